"""An essay judged in several dimensions at once: the essay is computed once, each dimension is a fork, the grade is one of a list.

python examples/essay_judge.py http://127.0.0.1:30000
"""

import sys

import banyan as sgl

ESSAY = (
    "Rivers made cities possible. A river carries water to drink and to wash with, it carries grain from the fields and "
    "timber from the hills, and it carries away what a city does not want. People who lived beside one could trade with "
    "people whom they would never meet. But a river also floods. The cities that lasted were those that built walls against"
    " the water and kept them in repair, year after year, long after those who remembered the last flood had died. To live "
    "beside a river is to agree, again in every generation, to do work whose use nobody sees. That agreement, more than the"
    " water, is what a city is made of."
)
DIMENSIONS = ["clarity", "originality", "evidence"]


@sgl.function
def essay_judge(s, essay):
    s += "Please judge the following essay.\n\nEssay: " + essay + "\n\n"
    forks = s.fork(len(DIMENSIONS))
    for fork, dimension in zip(forks, DIMENSIONS, strict=True):
        fork += f"{dimension.capitalize()}, commented on in one sentence: The essay"
        fork += sgl.gen("comment", max_tokens=40, stop="\n")
    for fork, dimension in zip(forks, DIMENSIONS, strict=True):
        s += f"On {dimension}: The essay" + fork["comment"] + "\n"
    s += "The grade of this essay, from A to D, is " + sgl.select("grade", ["A", "B", "C", "D"])


PROGRAM = essay_judge
ITEMS = [{"essay": ESSAY}]

if __name__ == "__main__":
    state = PROGRAM.run(**ITEMS[0], backend=sgl.RuntimeEndpoint(sys.argv[1]), temperature=0)
    print(state.text())
    print("grade:", state["grade"])
