"""How a Snake board looks: a picture for a notebook, coloured text for a terminal."""

import io
from html import escape

import numpy as np
from rich.console import Console
from rich.text import Text

from lab.envs.snake import Board, Snake

GROUND, GRID, FOOD = (22, 24, 29), (34, 37, 44), (213, 94, 0)
HEAD, BODY, TAIL = (230, 159, 0), (86, 180, 233), (0, 114, 178)  # the body fades from BODY to TAIL


def colours(game: Snake | Board) -> np.ndarray:
    """The colour of every cell, uint8 [height, width, 3]."""
    cells = np.empty((game.height, game.width, 3), np.uint8)
    cells[:] = GROUND
    cells[::2, 1::2] = cells[1::2, ::2] = GRID
    shares = np.linspace(0, 1, max(len(game.body) - 1, 1))[:, None]
    shades = (1 - shares) * np.array(BODY) + shares * np.array(TAIL)
    for (x, y), shade in zip(list(game.body)[1:], shades, strict=False):
        cells[y, x] = shade
    if game.food is not None:
        cells[game.food[1], game.food[0]] = FOOD
    x, y = game.body[0]
    cells[y, x] = HEAD
    return cells


def picture(game: Snake | Board, scale: int = 12) -> np.ndarray:
    """The board as a picture, uint8 [height * scale, width * scale, 3]."""
    return colours(game).repeat(scale, axis=0).repeat(scale, axis=1)


def rich_board(game: Snake | Board) -> Text:
    """The board as text for rich: two characters a cell, in 24-bit colours, one run of text per stretch of a colour."""
    text = Text(no_wrap=True)
    for y, row in enumerate(colours(game)):
        start = 0
        for x in range(1, len(row) + 1):
            if x == len(row) or (row[x] != row[start]).any():
                text.append("  " * (x - start), style=f"on rgb({','.join(map(str, row[start]))})")
                start = x
        text.append("\n" if y + 1 < game.height else "")
    return text


class Screen:
    """Draws to memory what a terminal would be sent: the published loop draws like that in its timed part."""

    def __init__(self, width: int = 80):
        self.file = io.StringIO()
        self.console = Console(
            file=self.file, force_terminal=True, force_jupyter=False, color_system="truecolor", width=width
        )  # in a notebook rich would show every board on the page

    def draw(self, game: Snake | Board, *lines: str) -> str:
        """The board and lines of text below it, as the characters that a terminal takes."""
        self.file.seek(0)
        self.file.truncate()
        self.console.print(rich_board(game), *(Text(line) for line in lines), sep="\n")
        return self.file.getvalue()


def moving_picture(boards: list[Board], title: str, scale: int = 10, ms: int = 60):
    """A game as a picture that moves and repeats by itself, a frame per board: a View that needs no kernel and no script."""
    from base64 import b64encode

    from PIL import Image

    from lab.views import View

    pictures = [Image.fromarray(picture(board, scale)).quantize(64, dither=Image.Dither.NONE) for board in boards]
    file = io.BytesIO()
    pictures[0].save(file, "GIF", save_all=True, append_images=pictures[1:], duration=ms, loop=0)
    said = f"{title}: {len(boards)} moves, score {boards[-1].score}"
    html = (
        f'<figure style="margin:0;color:inherit"><img alt="{escape(said)}" src="data:image/gif;base64,'
        f'{b64encode(file.getvalue()).decode()}" style="border-radius:4px;max-width:100%">'
        f'<figcaption style="font-size:12px;opacity:.75">{escape(said)}</figcaption></figure>'
    )
    return View(html, said)
