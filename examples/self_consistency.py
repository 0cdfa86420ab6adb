"""The same question answered several times by sampled reasoning; the most frequent answer wins.

python examples/self_consistency.py http://127.0.0.1:30000
"""

import collections
import re
import sys

import banyan as sgl

SHOTS = (
    "Question: A box holds 12 eggs. How many eggs are in 3 boxes?\n"
    "Reasoning: One box holds 12 eggs, so 3 boxes hold 3 times 12, which is 36. The answer is 36.\n\n"
    "Question: Ann has 15 marbles and gives 6 to Ben. How many has she left?\n"
    "Reasoning: She had 15 and gave away 6, so 15 minus 6, which is 9, are left. The answer is 9.\n\n"
)


@sgl.function
def self_consistency(s, question, samples):
    s += SHOTS + f"Question: {question}\nReasoning:"
    forks = s.fork(samples)
    forks += sgl.gen("reasoning", max_tokens=64, stop="\n")
    answers = []
    for fork in forks:
        found = re.findall(r"answer is (-?\d+)", fork["reasoning"])
        answers += found[-1:]
    counted = collections.Counter(answers).most_common(1)
    s["answer"] = counted[0][0] if counted else "none"
    s += f" The answer is {s['answer']}."


PROGRAM = self_consistency
ITEMS = [
    {"question": "A train has 8 cars with 20 seats each. How many seats are there?", "samples": 5},
    {"question": "Tom reads 7 pages a day. How many pages does he read in a week?", "samples": 5},
]

if __name__ == "__main__":
    for state in PROGRAM.run_batch(ITEMS, backend=sgl.RuntimeEndpoint(sys.argv[1]), temperature=0.8):
        print(state.text(), end="\n\n---\n\n")
