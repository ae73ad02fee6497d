set -x
W="python -m wandistiller"
C="--width 64 --height 64 --frames 9 --max_aspect 1"
python - <<'P'
from pathlib import Path
from wandistiller.models.sizes import find_size
from wandistiller.models.tiny import write_random_pipeline
write_random_pipeline(Path("runs/p/start"), find_size("tiny"))
P
(time $W train-vae --model runs/p/start --from_scratch --dataset_path world:20000:1+9x64x64 --output_dir runs/p/vae $C --num_steps 150 --batch_size 32 --learning_rate 2e-3 --workers 6 --log_every 50 --save_every 0 --statistics_samples 16) 2>&1 | tail -20
tail -2 runs/p/vae/metrics.jsonl
S=$(date +%s)
for i in 1 2 3 4; do $W encode --model runs/p/start --dataset_path world:8000:1+9x64x64 --cache_dir runs/p/cache --text_batch_size 256 --batch_size 128 $C > runs/p/enc$i.log 2>&1 & done; wait
echo encode took $(( $(date +%s) - S )); tail -3 runs/p/enc1.log
(time $W train --model runs/p/start --from_scratch --dataset_path world:8000:1+9x64x64 --cache_dir runs/p/cache --output_dir runs/p/t1 $C --num_steps 200 --batch_size 256 --workers 6 --log_every 50 --save_every 0 --use_ema) 2>&1 | tail -8
tail -1 runs/p/t1/metrics.jsonl
(time $W train --model runs/p/start --from_scratch --dataset_path world:8000:1+9x64x64 --cache_dir runs/p/cache --output_dir runs/p/t2 $C --num_steps 300 --batch_size 256 --workers 6 --log_every 50 --save_every 0 --use_ema --torch_compile) 2>&1 | tail -8
tail -2 runs/p/t2/metrics.jsonl
