"""A conversation: every turn goes on from what the server has cached of the turns before.

python examples/multi_turn_chat.py http://127.0.0.1:30000
"""

import sys

import banyan as sgl

QUESTIONS = [
    "Name a river in France.",
    "Which cities lie on it?",
    "Which of them is the largest?",
    "Say that in one sentence.",
]


@sgl.function
def multi_turn_chat(s, questions):
    s += sgl.system("You are a helpful assistant. Answer in one sentence.")
    for i, question in enumerate(questions):
        s += sgl.user(question)
        s += sgl.assistant(sgl.gen(f"answer_{i}", max_tokens=32))


PROGRAM = multi_turn_chat
ITEMS = [{"questions": QUESTIONS}]

if __name__ == "__main__":
    state = PROGRAM.run(**ITEMS[0], backend=sgl.RuntimeEndpoint(sys.argv[1]), temperature=0)
    for message in state.messages():
        print(f"{message['role']}: {message['content']}")
