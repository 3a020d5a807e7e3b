export RUN_NAME=llama-2-16vm-$(date +%Y-%m-%d-%H-%M)
export XLA_FLAGS="--xla_dump_to=$OUTPUT_PATH/$RUN_NAME/HLO
 --xla_gpu_enable_latency_hiding_scheduler=true --xla_gpu_enable_command_buffer=''
 --xla_gpu_all_reduce_combine_threshold_bytes=1073741824"
python MaxText/train.py MaxText/configs/models/gpu/llama2_7b.yml run_name=$RUN_NAME dcn_data_parallelism=16 \
  ici_fsdp_parallelism=8 base_output_directory=$OUTPUT_PATH profiler=xplane
