"""LoRA with TRL: an adapter of PEFT learns from questions and answers, over a parallel model.

    torchrun --nproc-per-node 2 examples/lora_trl.py

`ParallelTrainer` before TRL's trainer is what makes it parallel. The model and the words are tiny and random.
"""

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from meshwright.integrations.transformers import ParallelTrainer


class Trainer(ParallelTrainer, SFTTrainer):
    """TRL's trainer of supervised answers, over a parallel model."""


words = ["<pad>", "<eos>", "<unk>", *"what is a red green blue sky tree stone the colour of".split()]
split = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>"))
split.pre_tokenizer = pre_tokenizers.Whitespace()
special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
tokenizer = PreTrainedTokenizerFast(tokenizer_object=split, **special)
answers = {"sky": "blue", "tree": "green", "stone": "red"}
data = Dataset.from_dict(
    {"text": [f"what is the colour of a {thing} {colour}" for thing, colour in answers.items()] * 8}
)

torch.manual_seed(0)
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=len(words), pad_token_id=0, eos_token_id=1, **sizes))
arguments = SFTConfig(
    "lora-run",
    max_steps=6,
    per_device_train_batch_size=8,
    learning_rate=3e-2,
    logging_steps=1,
    max_length=16,
    bf16=False,
    gradient_checkpointing=False,
    use_cpu=not torch.cuda.is_available(),
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
)
adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
trainer = Trainer(model, arguments, train_dataset=data, processing_class=tokenizer, peft_config=adapter)
trainer.train()
for entry in trainer.state.log_history:
    if "loss" in entry and trainer.is_world_process_zero():
        print(f"step {entry['step']:3d}  loss {float(entry['loss']):.4f}")
trainer.save_model("lora-adapter")  # the adapter alone, as PEFT reads it
torch.distributed.destroy_process_group()
