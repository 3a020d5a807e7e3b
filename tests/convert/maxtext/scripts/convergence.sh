#!/bin/bash
OUTPUT=${1}
KIND=${2:-tfds}
CMD="python3 MaxText/train.py MaxText/configs/base.yml run_name=conv steps=20400 per_device_batch_size=8.0"
CMD+=" learning_rate=1e-3 enable_checkpointing=false"
if [ "$KIND" = "hf" ]; then
  CMD+=" dataset_type=hf hf_path=c4"
elif [ "$KIND" == "tfds" ]; then
  CMD+=" dataset_type=tfds"
fi
export LOSS=2.7
$CMD ici_fsdp_parallelism=4
python3 end_to_end/tpu/eval_assert.py final_loss metrics.txt $LOSS
