"""What the directory of an image says of itself: its manifest; and what is told of such directories.

Data only. Who writes and checks directories is `hegmd.images.files`; here are the words that hegmctl shows as well.

The manifest is JSON on disk, not msgpack: it is small (what is large has tables of its own), it is what an operator
looks into when nothing else runs any more, and any tool of any later year reads it.
"""

from __future__ import annotations

from .record import Record, field

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

FORMAT = "hegm-image"
VERSION = 1


class ImageGpu(Record):
    """A GPU that the job was on."""

    id: str = field("its name on that node, such as gpu0")
    uuid: str = field("its identity")
    chip: str | None = field("its model, which has to be the same where the image is restored")
    memory_bytes: int | None = field("its memory")


class ImageProcess(Record):
    """A process of the tree that was dumped."""

    pid: int = field("its process id, which it has again after the restore")
    parent_pid: int | None = field("its parent in the tree; null for the root")
    uid: int | None = field("its user")
    command: str | None = field("its command line")


class ImageWorker(Record):
    """A process of the job that had bytes on a GPU, and what bringing it back takes."""

    pid: int = field("its process id")
    gpus: tuple[str, ...] = field("the GPUs that it was on, by identity")
    carrier: str | None = field("who carried its bytes; null when the driver carried all")
    size_bytes: int = field("bytes of its storages, which are in `bytes`")
    rest_bytes: int = field("bytes that the driver carried, which are in the process")
    bytes: tuple[str, ...] = field("names of its byte files, in their order")
    token: str | None = field("the token with which its agent reconnects", default=None)
    boundary: int | None = field("the batch boundary at which it stood", default=None)
    agent_version: str | None = field("version of the agent in it", default=None)
    frameworks: Mapping[str, str] | None = field("the frameworks it trains with, and their versions", default=None)
    more: Mapping[str, object] | None = field("what else the way back takes", default=None)


class ImageFile(Record):
    """A file of the image."""

    name: str = field("its name in its folder")
    size_bytes: int = field("bytes of memory that it holds")
    stored_bytes: int = field("bytes that are written of it; the rest are zeros, or saved by compression")
    sum: str = field("of `criu`: SHA-256 of the SHA-256 of each 8 MiB; of `bytes`: SHA-256 of its table of checksums")


class Manifest(Record):
    """All that is said of an image. Keys that this version does not know are passed over."""

    format: str = field("always hegm-image", default=FORMAT)
    version: int = field("version of the directory's form", default=VERSION)
    id: str = field("names this image and no other", default="")
    made_utc: float | None = field("when it was whole", default=None)
    uid: int = field("whose it is", default=0)
    gid: int = field("the primary group of whose it is", default=0)
    hegmd_version: str = field("the hegmd that wrote it", default="")
    host: str = field("the node that it is from", default="")
    kernel: str = field("that node's kernel", default="")
    architecture: str = field("that node's kind of processor", default="")
    vendor: str | None = field("vendor of the GPUs; null when there were none", default=None)
    driver_version: str | None = field("version of their driver", default=None)
    gpus: tuple[ImageGpu, ...] = field("the GPUs that the job was on", default=())
    criu_version: str = field("the CRIU that dumped the processes", default="")
    criu_options: tuple[str, ...] = field("additional options of CRIU", default=())
    root_pid: int = field("the root of the tree that was dumped", default=0)
    processes: tuple[ImageProcess, ...] = field("the processes of the tree", default=())
    workers: tuple[ImageWorker, ...] = field("those with bytes on GPUs", default=())
    leave_running: bool = field("whether the job went on after it", default=False)
    node: Mapping[str, object] | None = field("what a node has to have in common with that one", default=None)
    more: Mapping[str, object] | None = field("what else the way back takes", default=None)
    criu_files: tuple[ImageFile, ...] = field("files in `criu`", default=())
    byte_files: tuple[ImageFile, ...] = field("files in `bytes`", default=())


class ImageSeen(Record):
    """A directory that is an image, or looks like what is left of one."""

    path: str = field("where it is")
    state: str = field(
        "whole, in-use (being restored, written or removed), left-over (of a writer that ended) or broken"
    )
    why: str | None = field("what is wrong with it; null when nothing is known to be")
    size_bytes: int | None = field("bytes of memory that the image holds; null when unknown")
    stored_bytes: int | None = field("bytes that it takes on disk; null when unknown")
    made_utc: float | None = field("when it was whole; null when unknown")
    host: str | None = field("the node that it is from; null when unknown")
    command: str | None = field("the command line of the root of its processes; null when unknown")


class ImagesSeen(Record):
    """The answer of `hegmctl images ls`."""

    images: tuple[ImageSeen, ...] = field("the images, by path")


class ImageProgress(Record):
    """How far a check of an image is."""

    done_bytes: int = field("bytes that were looked at")
    size_bytes: int = field("bytes that there are")


class ImageVerified(Record):
    """The answer of `hegmctl images verify`: every byte was read and fits its checksum."""

    path: str = field("where it is")
    size_bytes: int = field("bytes of memory that the image holds")
    stored_bytes: int = field("bytes that were read")
    took_s: float = field("how long that took")
    foreign: tuple[str, ...] = field("what lies in the directory and is no part of the image", default=())


class ImageRemoved(Record):
    """The answer of `hegmctl images rm`."""

    paths: tuple[str, ...] = field("the removed directories")
