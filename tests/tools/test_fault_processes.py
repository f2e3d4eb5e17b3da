"""What a server under fault injection holds: pools of a bounded size are no leak."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from faults import processes
from faults.processes import TEMPLATE_CHILDREN

from cog_triton.text import chat_template, template_child


@contextmanager
def template_children(count: int) -> Iterator[int]:
    """A process with so many children that render templates."""
    assert len(chat_template.TemplatePool().places) == TEMPLATE_CHILDREN
    code = "import subprocess, sys\nchildren = [subprocess.Popen(sys.argv[1:-1], stdin=-1) "
    code += "for _ in range(int(sys.argv[-1]))]\nprint(flush=True)\ninput()"
    # Such a child is known by its command line.
    sleeper = [sys.executable, "-c", "input()", template_child.__name__]
    with subprocess.Popen(
        [sys.executable, "-c", code, *sleeper, str(count)], stdin=-1, stdout=-1
    ) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()
        yield parent.pid
        parent.communicate(b"\n")


def test_children_that_render_templates_are_a_pool() -> None:
    with ExitStack() as stack:
        counts = [
            processes.held(stack.enter_context(template_children(count)), 0).processes
            for count in (1, 2, 3)
        ]
    assert counts == [1, 1, 2]
