python3 -m MaxText.train base_config=base.yml run_name=one model_name=llama3.1-405b dcn_fsdp_parallelism=128 \
  ici_fsdp_parallelism=8 enable_checkpointing: False steps=10 per_device_batch_size=1 max_target_length=8192 \
  attention=cudnn_flash_te remat_policy=full dataset_type=synthetic run_name=two
