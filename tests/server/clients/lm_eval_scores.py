"""A task's score by lm-eval through a server, and by transformers on the same weights, in float32.

``pip install lm-eval transformers torch``, start ``jaxinfer serve``, then
``python -m tests.server.clients.lm_eval_scores URL FILE.gguf``, the file being the default model's. The exit code is 0
if both give the same scores and choose the same answers.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

# A question, its answer, and the kind of answer: the others of this kind are the wrong choices.
QUESTIONS = """
The capital of France is|Paris|city; The capital of Italy is|Rome|city; The capital of Spain is|Madrid|city
The capital of Germany is|Berlin|city; The capital of Japan is|Tokyo|city; The capital of Egypt is|Cairo|city
The capital of Russia is|Moscow|city; The capital of England is|London|city; The capital of Greece is|Athens|city
The capital of China is|Beijing|city; The capital of Cuba is|Havana|city; The capital of Kenya is|Nairobi|city
The opposite of hot is|cold|word; The opposite of big is|small|word; The opposite of fast is|slow|word
The opposite of old is|young|word; The opposite of hard is|soft|word; The opposite of dark is|light|word
The opposite of dry is|wet|word; The opposite of poor is|rich|word; The opposite of early is|late|word
The baby of a dog is called a|puppy|baby; The baby of a cat is called a|kitten|baby
The baby of a cow is called a|calf|baby; The baby of a sheep is called a|lamb|baby
The baby of a horse is called a|foal|baby; The baby of a lion is called a|cub|baby
The baby of a goose is called a|gosling|baby; The baby of a duck is called a|duckling|baby
The colour of grass is|green|colour; The colour of snow is|white|colour; The colour of blood is|red|colour
The colour of the sky is|blue|colour; The colour of coal is|black|colour; The colour of a lemon is|yellow|colour
The largest planet is|Jupiter|thing; The metal that is liquid at room temperature is|mercury|thing
The gas that plants take in is|carbon dioxide|thing; The language of Brazil is|Portuguese|thing
The author of Hamlet is|William Shakespeare|thing; The currency of Japan is the|yen|thing
The chemical symbol of gold is|Au|thing; The fastest land animal is the|cheetah|thing
The longest river of Africa is the|Nile|thing; The highest mountain of the Earth is Mount|Everest|thing
The number of days in a week is|seven|number; The number of legs of a spider is|eight|number
The number of months in a year is|twelve|number; The number of sides of a triangle is|three|number
The number of players of a football team on the field is|eleven|number; The number of wheels of a bicycle is|two|number
Ten minus six is|four|number; Five times two is|ten|number; Three plus three is|six|number; Ten minus one is|nine|number
"""
METRICS = ("acc,none", "acc_norm,none")


def write_task(path: Path) -> int:
    """Write the questions, each with four choices; return how many there are."""
    asked = [one.strip().split("|") for line in QUESTIONS.split("\n") for one in line.split(";") if one.strip()]
    with path.open("w", encoding="utf-8") as file:
        for number, (question, answer, kind) in enumerate(asked):
            others = [other for _, other, other_kind in asked if other_kind == kind and other != answer]
            choices = [others[(number * 3 + step * 2) % len(others)] for step in range(3)]
            choices = list(dict.fromkeys(choices))
            choices.insert(number % (len(choices) + 1), answer)
            file.write(json.dumps({"question": question, "choices": choices, "label": choices.index(answer)}) + "\n")
    return len(asked)


def task(path: Path) -> dict[str, Any]:
    return {
        "task": "little_facts",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(path)}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "label",
        "metric_list": [
            {"metric": name, "aggregation": "mean", "higher_is_better": True} for name in ("acc", "acc_norm")
        ],
    }


def main(address: str, gguf: Path) -> int:
    import openai
    import torch
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.models.openai_completions import LocalCompletionsAPI
    from transformers import AutoModelForCausalLM, AutoTokenizer

    name = openai.OpenAI(base_url=f"{address}/v1", api_key="none").models.list().data[0].id
    with tempfile.TemporaryDirectory() as scratch:
        questions, folder = Path(scratch) / "questions.jsonl", Path(scratch) / "model"
        count = write_task(questions)
        given: dict[str, Any] = {"gguf_file": gguf.name}
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **given)
        tokenizer.save_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **given)
        sides = {
            "jaxinfer": LocalCompletionsAPI(
                model=name, base_url=f"{address}/v1/completions", tokenizer=str(folder), max_length=2048
            ),
            "transformers": HFLM(pretrained=model, tokenizer=tokenizer, max_length=2048),
        }
        found = {
            side: simple_evaluate(model=model, tasks=[task(questions)], bootstrap_iters=0)
            for side, model in sides.items()
        }
    scores = {side: {one: result["results"]["little_facts"][one] for one in METRICS} for side, result in found.items()}
    told = [
        [value for sample in result["samples"]["little_facts"] for value, _ in _pairs(sample["filtered_resps"])]
        for result in found.values()
    ]
    apart = max(abs(one - other) for one, other in zip(*told, strict=True))
    picked = [[int(sample["acc"]) for sample in result["samples"]["little_facts"]] for result in found.values()]
    for side, values in scores.items():
        print(f"{side}: " + ", ".join(f"{one.partition(',')[0]} {value:.6f}" for one, value in values.items()))
    print(f"{count} questions, {len(told[0])} log-likelihoods, which differ by {apart:.2e} at most")
    return int(scores["jaxinfer"] != scores["transformers"] or picked[0] != picked[1])


def _pairs(responses: Any) -> list[tuple[float, bool]]:
    return [(float(value), bool(is_greedy)) for value, is_greedy in responses]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1].rstrip("/"), Path(sys.argv[2])))
