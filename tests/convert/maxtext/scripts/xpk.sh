xpk workload create --cluster c --workload w --tpu-type=v5litepod-256 --num-slices=2 \
  --command "echo hi && python3 MaxText/train.py MaxText/configs/base.yml model_name=llama2-7b steps=5 per_device_batch_size=4"
