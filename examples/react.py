"""A ReAct loop with a local tool: the model thinks and calls, this program answers the calls.

python examples/react.py http://127.0.0.1:30000
"""

import ast
import operator
import sys

import banyan as sgl

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
EXAMPLE = (
    "Answer the question. Use calculate[...] for arithmetic, finish[...] to answer.\n\n"
    "Question: What is twice the sum of 3 and 4?\n"
    "Thought 1: I add 3 and 4 and double the sum.\nAction 1: calculate[(3 + 4) * 2]\nObservation 1: 14\n"
    "Thought 2: Now I know the answer.\nAction 2: finish[14]\n\n"
)


def calculate(expression):
    """The value of an expression of numbers, + - * / and brackets."""

    def value(node):
        if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
            return node.value
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](value(node.left), value(node.right))
        raise ValueError(expression)

    try:
        return str(value(ast.parse(expression.strip(), mode="eval").body))
    except (ValueError, SyntaxError, ZeroDivisionError):
        return "this cannot be calculated"


@sgl.function
def react(s, question, max_steps=3):
    s += EXAMPLE + "Question: " + question + "\n"
    for i in range(1, max_steps + 1):
        s += f"Thought {i}:" + sgl.gen(f"thought_{i}", max_tokens=32, stop="\n") + "\n"
        s += f"Action {i}: " + sgl.select(f"tool_{i}", ["calculate", "finish"])
        s += "[" + sgl.gen(f"input_{i}", max_tokens=16, stop=["]", "\n"]) + "]\n"
        if s[f"tool_{i}"] == "finish":
            s["answer"] = s[f"input_{i}"]
            return
        s += f"Observation {i}: {calculate(s[f'input_{i}'])}\n"
    s["answer"] = "none"


PROGRAM = react
ITEMS = [{"question": "A shelf holds 14 books. How many books do 6 shelves hold?"}]

if __name__ == "__main__":
    state = PROGRAM.run(**ITEMS[0], backend=sgl.RuntimeEndpoint(sys.argv[1]), temperature=0)
    print(state.text())
    print("answer:", state["answer"])
