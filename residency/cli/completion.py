"""The verb `completion`: the script by which a shell completes verbs, options and streams."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from residency.cli import COMPLETION_VARIABLE
from residency.cli import residency as group
from residency.cli.common import exit_codes

SHELLS = ("bash", "zsh", "fish")


@click.command(epilog=exit_codes(journal=False))
@click.argument("shell", type=click.Choice(SHELLS))
def completion(*, shell: str) -> None:
    """Print the script that completes verbs, options and the journal's streams in a shell.

    In ~/.bashrc: eval "$(residency completion bash)". In ~/.zshrc: the same with zsh. For fish: residency completion
    fish > ~/.config/fish/completions/residency.fish
    """
    found = get_completion_class(shell)
    assert found is not None, "click knows these shells"
    click.echo(found(group, {}, "residency", COMPLETION_VARIABLE).source())
