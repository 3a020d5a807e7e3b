: "${BASE:?say where}"
STEPS=$(( 1000 * 3 + 5 ))
HOSTS=4; PER=$((8/HOSTS))
while true; do break; done
python3 -m maxtext.trainers.pre_train.train model_name=llama2-7b steps=${STEPS} per_device_batch_size=$PER \
  base_output_directory=${BASE%/} adamw_mask='["token_embedder/embedding"]' ici_fsdp_parallelism=8
