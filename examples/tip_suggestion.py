"""Two tips, each worked out by a fork of its own, and a summary of both.

python examples/tip_suggestion.py http://127.0.0.1:30000
"""

import sys

import banyan as sgl


@sgl.function
def tip_suggestion(s, topic):
    s += f"Here are two tips for {topic}: 1. Plan ahead. 2. Start small.\n\n"
    forks = s.fork(2)
    for fork, tip in zip(forks, ("Plan ahead", "Start small"), strict=True):
        fork += f"The tip '{tip}', in a short paragraph:\n"
        fork += sgl.gen("detail", max_tokens=48, stop="\n\n")
    s += "Tip 1: " + forks[0]["detail"] + "\nTip 2: " + forks[1]["detail"] + "\n"
    s += "In summary, " + sgl.gen("summary", max_tokens=32, stop="\n")


PROGRAM = tip_suggestion
ITEMS = [{"topic": "learning to cook"}, {"topic": "learning the violin"}, {"topic": "running a marathon"}]

if __name__ == "__main__":
    for state in PROGRAM.run_batch(ITEMS, backend=sgl.RuntimeEndpoint(sys.argv[1]), temperature=0):
        print(state.text(), end="\n\n---\n\n")
