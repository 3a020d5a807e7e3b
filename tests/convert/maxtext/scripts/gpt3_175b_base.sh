set -euox pipefail
RUNNAME=${1:-${RUNNAME:-gpt3-$(date +%Y%m%d)}}
BATCH=${2:-4}
REMAT=${3:-${REMAT:-full}}
DATA=${4:-1}
FSDP=${5:-64}
TENSOR=${6:-8}
python3 MaxText/train.py MaxText/configs/base.yml run_name="${RUNNAME}" model_name=gpt3-175b \
  enable_checkpointing=false async_checkpointing=false steps=20 per_device_batch_size=${BATCH} \
  ici_data_parallelism=${DATA} ici_fsdp_parallelism=${FSDP} ici_tensor_parallelism=${TENSOR} \
  remat_policy=${REMAT} attention=flash quantization=int8 dataset_type=synthetic
