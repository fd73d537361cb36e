"""Prompts of the SmolLM2 examples, made by seed: lists of words to reverse, and topics to write a sentence about.

    python examples/smollm2/make_data.py FOLDER

Each file holds one JSON object a line: `prompt`, a list of chat messages, and the column that the reward needs.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

Row = dict[str, Any]

# Common words of five letters, each a single token of this model after a space, one or two at the start of a text.
_WORDS = """
about actor agent angel angle apple asset audio beach below birth black blank block blood board brain brand bread
brick brown brush cable chain chair chart chief child claim class clean clock cloth cloud coast color count court
cover craft crime cross crowd cycle depth draft dream dress drink drive eagle early earth eight enemy entry error
event faith fault fence field fight final flash floor focus force frame fresh front fruit glass grain grass green
group guard guess guest guide heart horse hotel house human image index input issue judge juice knife label large
layer lemon level light limit logic lunch maker maple match mayor media metal meter model money month motor mouse
mouth movie music night noise north novel nurse ocean offer orbit order organ owner paint panel paper party patch
peace pearl phase phone photo piano piece pilot pitch pizza place plain plane plant plate point pound power press
price pride prize proof queen quiet radio ranch range ratio reply rider ridge right river robot round route scale
scene scope score seven shape share sheep sheet shelf shell shift shirt shore skill slice slope smile smoke snake
sound south space speed spice sport squad staff stage stair stamp state steam steel stick stock stone store storm
story straw study sugar sweet table taste three tiger title toast today tooth topic touch tower track trade trail
train treat trial tribe truck trust truth uncle union value video virus visit voice waste watch water whale wheat
wheel white woman world wound youth
"""

_TOPICS = """
apples autumn babies bananas bears bees bicycles birds boats books bread bridges butterflies cactus cakes candles cars
castles cats cheese chess chickens chocolate cities clocks clouds coffee computers cooking cows dancing deer deserts
dogs dolphins dragons dreams ducks eagles earthquakes eggs elephants engines farms fire fish flowers football forests
foxes friends frogs fruit gardens ghosts giraffes glaciers goats gold grapes grass guitars hammers hats holidays honey
horses hospitals hotels houses ice insects islands jazz jungles kangaroos keys kites knives ladders lakes lamps
languages laughter leaves lemons letters libraries lightning lions machines maps markets mathematics medicine milk
mirrors money monkeys mountains mushrooms music nature newspapers night numbers oceans oil onions oranges owls
paintings paper parks parrots penguins phones photographs pianos pigs pirates pizza planes planets plants poetry
potatoes rabbits radios rain rainbows rice rivers roads robots rockets roses sailing salt sand schools science seeds
shadows sharks sheep ships shoes silence silver singing sleep snakes snow soap soup spiders sports spring stars
stories storms sugar summer sunlight swimming tables tea teachers telescopes tennis theatres thunder tigers time
tomatoes toys trains travel trees tunnels turtles umbrellas valleys vegetables villages violins volcanoes water whales
wheat wind windows winter wolves wood wool work writing zebras
"""

# Held out are lists, not words, and topics as a whole.
TRAINING_LISTS = 512
HELD_OUT = 64
_SOLVED = ("table, river, cloud", "green, horse, paper, light")
_WORDINGS = (
    "Write one short sentence about {topic}.",
    "Tell me about {topic} in one short sentence.",
    "What are your thoughts on {topic}? One short sentence, please.",
    "Say something about {topic} in a single short sentence.",
)


def reversal_rows(seed: int) -> tuple[list[Row], list[Row]]:
    """(training, held-out) lists of three or four words to reverse, no two alike; column `answer`.

    Two solved lists come first, as turns of the same chat. The system message is there because the chat template puts
    a longer one of its own before messages that have none.
    """
    generator = random.Random(seed)
    words, lists = _WORDS.split(), dict[str, None]()
    while len(lists) < TRAINING_LISTS + HELD_OUT:
        lists[", ".join(generator.sample(words, generator.choice((3, 4))))] = None
    rows = [{"prompt": _reversal_chat(text), "answer": _reversed(text)} for text in lists]
    return rows[:TRAINING_LISTS], rows[TRAINING_LISTS:]


def sentence_rows(seed: int) -> tuple[list[Row], list[Row]]:
    """(training, held-out) requests for a short sentence about a topic, shuffled; column `topic`.

    Training has every topic in every wording; held-out topics are others, each in one wording.
    """
    generator = random.Random(seed)
    topics = _TOPICS.split()
    generator.shuffle(topics)
    held_out = [_sentence_row(topic, generator.choice(_WORDINGS)) for topic in topics[:HELD_OUT]]
    training = [_sentence_row(topic, wording) for topic in topics[HELD_OUT:] for wording in _WORDINGS]
    generator.shuffle(training)
    return training, held_out


def write_rows(path: Path, rows: list[Row]) -> None:
    """Write one JSON object a line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main() -> None:
    """Write the four files to the folder named on the command line."""
    parser = argparse.ArgumentParser(description="Make the prompts of the SmolLM2 examples.")
    parser.add_argument("folder", type=Path, help="folder to write to")
    parser.add_argument("--seed", type=int, default=0, help="seed of the lists, topics and splits")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for name, (training, held_out) in {
        "reverse": reversal_rows(arguments.seed),
        "sentence": sentence_rows(arguments.seed),
    }.items():
        write_rows(arguments.folder / f"{name}_training.jsonl", training)
        write_rows(arguments.folder / f"{name}_held_out.jsonl", held_out)


def _reversal_chat(text: str) -> list[dict[str, str]]:
    messages = [{"role": "system", "content": "Reverse the list."}]
    for solved in _SOLVED:
        messages += [_request(solved), {"role": "assistant", "content": _reversed(solved)}]
    return [*messages, _request(text)]


def _request(text: str) -> dict[str, str]:
    return {"role": "user", "content": f"Reverse: {text}"}


def _reversed(text: str) -> str:
    return ", ".join(reversed(text.split(", ")))


def _sentence_row(topic: str, wording: str) -> Row:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": wording.format(topic=topic)}]
    return {"prompt": messages, "topic": topic}


if __name__ == "__main__":
    main()
