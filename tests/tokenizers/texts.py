"""Texts on which tokenizers are known to differ, and a strategy for more."""

from hypothesis import strategies

TEXTS = [
    "",
    " ",
    "   ",
    "Hello, world!",
    " leading space",
    "  two leading, trailing  ",
    "a  b   c    d\t\te\n\n\nf \n g\r\nh",
    "1234567890 3.14159 0x1F 1e-9 ١٢٣ ½ ²",
    "don't DON'T I'll we've 'tis it's",
    "def f(x):\n\treturn {k: v**2 for k, v in x.items()}  # done\n",
    "😀😃 👩‍👩‍👧‍👦 🏳️‍🌈 🇫🇷 👍🏽",
    "漢字かな交じり文。中文,한국어 ไทย العربية हिन्दी",
    "e\u0301 n\u0303 Å Å ﬁ ｆｕｌｌ Z͑ͫ̓ͪ̂ͫ̽",
    "\u00a0\u200b\u2028\ufeff\ufffd\x00\x7f",
    "a▁b ▁c",
    "<unk><0x0A>",
]

SPECIAL_TEXTS = [
    "<|im_start|>user\nHi<|im_end|>\n<|endoftext|>",
    "a<|im_start|>b <|im_end|> c",
    "<|im_start|><|im_start|> x <|im_star|>",
    "<s>[INST] Hi [/INST] there</s>",
    "a <s> b</s>c  [INST]  d",
]

words = strategies.text(
    strategies.one_of(strategies.sampled_from(" \n\t'0123abcé漢😀\u200d\u0301"), strategies.characters(codec="utf-8")),
    max_size=40,
)
