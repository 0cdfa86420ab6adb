"""A tree of thoughts: plans, then a solution for each plan, then a judgement of each; all share the paths above them.

python examples/tree_of_thought.py http://127.0.0.1:30000
"""

import sys

import banyan as sgl

PLANS = ("Work forwards from what is given.", "Work backwards from what is asked.")


@sgl.function
def tree_of_thought(s, problem):
    s += "Solve the problem step by step.\nProblem: " + problem + "\n"
    branches = s.fork(len(PLANS))
    leaves = []
    for branch, plan in zip(branches, PLANS, strict=True):
        branch += "Plan: " + plan + "\nFirst thought:" + sgl.gen("thought", max_tokens=32, stop="\n") + "\n"
        tries = branch.fork(2)
        for number, leaf in enumerate(tries):
            leaf += f"Attempt {number + 1}:" + sgl.gen("solution", max_tokens=48, stop="\n")
            leaf += "\nIs this attempt right? Answer:" + sgl.select("verdict", [" yes", " no"])
            leaves.append(leaf)
    right = [leaf["solution"] for leaf in leaves if leaf["verdict"] == " yes"]
    best = (right or [leaf["solution"] for leaf in leaves])[0]
    s += "Solution:" + best + "\nFinal answer:" + sgl.gen("answer", max_tokens=24, stop="\n")


PROGRAM = tree_of_thought
ITEMS = [{"problem": "A farmer has 17 sheep. All but 9 run away. How many sheep are left?"}]

if __name__ == "__main__":
    state = PROGRAM.run(**ITEMS[0], backend=sgl.RuntimeEndpoint(sys.argv[1]), temperature=0)
    print(state.text())
