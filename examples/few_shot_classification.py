"""Many items classified by the same examples: the examples are computed once for all of them.

python examples/few_shot_classification.py http://127.0.0.1:30000
"""

import sys

import banyan as sgl

EXAMPLES = [
    ("The plot was dull and the acting worse.", "negative"),
    ("I have not laughed this much in years.", "positive"),
    ("Two hours that I will never get back.", "negative"),
    ("A warm and clever film for all ages.", "positive"),
    ("The music alone is worth the ticket.", "positive"),
    ("It ends as it begins, without an idea.", "negative"),
]
REVIEWS = [
    "What a joy from the first minute to the last.",
    "I walked out after half an hour.",
    "The best performance of her career.",
    "Loud, long and empty.",
    "My children want to see it again.",
    "Nothing in it is true, and nothing is funny.",
    "Beautiful pictures and a great story.",
    "The script must have been written in an afternoon.",
]


@sgl.function
def classify(s, review):
    s += "Each review of a film is positive or negative.\n\n"
    for text, label in EXAMPLES:
        s += f"Review: {text}\nSentiment: {label}\n\n"
    s += f"Review: {review}\nSentiment:" + sgl.select("label", [" positive", " negative"])


PROGRAM = classify
ITEMS = [{"review": review} for review in REVIEWS]

if __name__ == "__main__":
    states = PROGRAM.run_batch(ITEMS, backend=sgl.RuntimeEndpoint(sys.argv[1]))
    for item, state in zip(ITEMS, states, strict=True):
        print(f"{state['label'].strip():9} {item['review']}")
