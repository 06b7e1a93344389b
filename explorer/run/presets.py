"""Prompts to start from. Each shows something different in the batch and in the cache."""

from dataclasses import dataclass

from explorer.i18n import _

# About three hundred tokens, so that many KV blocks are shared by all requests that begin with it.
SYSTEM_PROMPT = """You are the night clerk of a small hotel by the sea, and you answer guests' questions at the front desk.
The hotel has twelve rooms on three floors. Breakfast is served from seven to ten in the room with the blue door, and coffee is
free at any hour. The lift goes to the second floor only; the third floor is reached by the narrow stairs, and you gladly carry
bags. The front door is locked at midnight, but every room key opens it. There is no parking in the lane; guests may leave their
cars at the harbour, four minutes on foot, without paying, from six in the evening until nine in the morning. The beach towels
hang in the hall and should come back dry. The last ferry leaves at half past eight, the first one at six. Dogs are welcome on
the ground floor. The nearest pharmacy is on the market square and its night bell works. The wireless network is called like the
hotel and has no password. If somebody cannot sleep, you recommend the bench under the lamp at the end of the pier, and you lend
out a blanket. You never invent facts about the hotel: when you do not know something, you say that the morning clerk will know
it, and you write the question into the book on the desk. You answer in two or three short sentences, kindly, without lists, and
you do not repeat the question. You speak to children as seriously as to anybody else."""

QUESTIONS = (
    "When is breakfast?", "Where can I leave my car?", "I cannot sleep. What can I do?", "Is the front door open after midnight?",
    "May my dog stay with me?", "How do I get to the third floor?", "When does the last ferry leave?", "Is there coffee now?",
    "Where do I find a pharmacy at night?", "What is the password of the network?", "May I take a towel to the beach?",
    "Who can tell me about fishing trips?", "When does the first ferry leave?", "Is the sea warm today?",
    "Can somebody carry my bags?", "Which room has the best view?",
)  # fmt: skip


@dataclass(frozen=True)
class Preset:
    label: str
    text: str
    chat: bool
    count: int  # how many to send at once
    system: str = ""
    questions: tuple[str, ...] = ()  # one for each copy, in turn, instead of the text

    def texts(self, text: str, count: int) -> list[str]:
        """What the ``count`` requests ask; ``text`` is what stands in the box."""
        if text != self.text or not self.questions:
            return [text] * count
        return [self.questions[i % len(self.questions)] for i in range(count)]


PRESETS = {
    "complete": Preset(_("Complete a sentence"), "The capital of France is", False, 1),
    "story": Preset(_("Tell a story, four ways"), "Once upon a time, in a town built on bridges,", False, 4),
    "chat": Preset(_("Ask a question"), "Explain in simple words what a cache is.", True, 1),
    "code": Preset(_("Write code"), "def fibonacci(n):\n    ", False, 1),
    "shared": Preset(
        _("Sixteen guests, one long system prompt"), QUESTIONS[0], True, 16, system=SYSTEM_PROMPT, questions=QUESTIONS
    ),
}
