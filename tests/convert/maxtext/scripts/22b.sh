echo "22B on v4-128"
set -e

# Anyone may say otherwise: bash 22b.sh RUN_NAME=mine
export EXECUTABLE="train.py"
export OUTPUT_PATH="gs://a-bucket"
export DATASET_PATH="gs://some-data"
for ARGUMENT in "$@"; do
    IFS='=' read -r KEY VALUE <<< "$ARGUMENT"
    export "$KEY"="$VALUE"
done

if [ -n "$RUN_NAME" ];
then
    export M_RUN_NAME=$RUN_NAME
fi

bash preflight.sh

export LIBTPU_INIT_ARGS="--xla_tpu_enable_async_collective_fusion=true
 TPU_MEGACORE=MEGACORE_DENSE"
python3 MaxText/$EXECUTABLE MaxText/configs/base.yml\
    ici_fsdp_parallelism=64 steps=10 per_device_batch_size=13 profiler=xplane remat_policy=full\
    base_emb_dim=6144 base_num_kv_heads=24 base_num_query_heads=24 base_mlp_dim=24576 base_num_decoder_layers=48\
    base_output_directory=$OUTPUT_PATH dataset_path=$DATASET_PATH
