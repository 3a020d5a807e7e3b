export PLATFORM=gke
bash setup_rto.sh PLATFORM=$PLATFORM
python3 MaxText/train.py MaxText/configs/base.yml \
    steps=15 per_device_batch_size=1 enable_checkpointing=false remat_policy='qkv_proj_offloaded' \
    global_parameter_scale=128 ici_fsdp_parallelism=16 ici_tensor_parallelism=16 max_target_length=2048 \
    base_output_directory=$OUTPUT_PATH use_iota_embed=true reuse_example_batch=1 \
    dataset_type=synthetic attention='flash' gcs_metrics=true fused_qkv=true fused_mlp=true \
