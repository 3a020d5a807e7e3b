python3 -m MaxText.${EXECUTABLE:-train} "${MAXTEXT_PKG_DIR:-${ROOT:-$PWD}/src/MaxText}/"configs/base.yml model_name=gpt3-175b\
  steps=30 per_device_batch_size=0.5 enable_checkpointing=false remat_policy=full ici_fsdp_parallelism=-1\
  ici_tensor_parallelism=16 max_target_length=2048 base_output_directory=$OUTPUT_PATH reuse_example_batch=1\
  dataset_type=synthetic gcs_metrics=true attention='flash'
