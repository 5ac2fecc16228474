"""The manifest of an image, and the answers of `hegmctl images`.

Records only: `hegmd.images.files` writes and checks the directories. The manifest is JSON on disk, not msgpack: it is
small, an operator can read it when nothing else runs, and so can any later tool.
"""

from __future__ import annotations

from .record import Record, field

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

FORMAT = "hegm-image"
VERSION = 1


class ImageGpu(Record):
    """A GPU that the job used."""

    id: str = field("its name on its node, such as gpu0")
    uuid: str = field("its UUID")
    chip: str | None = field("its model; the image needs the same model to be restored")
    memory_bytes: int | None = field("its memory")


class ImageProcess(Record):
    """A process of the dumped tree."""

    pid: int = field("its process id; the restored process has the same one")
    parent_pid: int | None = field("its parent; null for the root of the tree")
    uid: int | None = field("its user")
    command: str | None = field("its command line")


class ImageWorker(Record):
    """A process of the job that had bytes on a GPU, and what its restore needs."""

    pid: int = field("its process id")
    gpus: tuple[str, ...] = field("the GPUs that it was on, by UUID")
    carrier: str | None = field("the carrier of its bytes; null: the driver transferred all")
    size_bytes: int = field("bytes of its storages, in the folder `bytes`")
    rest_bytes: int = field("bytes that the driver transferred, in the process's memory")
    bytes: tuple[str, ...] = field("names of its byte files, in order")
    token: str | None = field("the token with which its agent reconnects", default=None)
    boundary: int | None = field("the batch boundary at which it was parked", default=None)
    agent_version: str | None = field("version of its agent", default=None)
    frameworks: Mapping[str, str] | None = field("its frameworks and their versions", default=None)
    more: Mapping[str, object] | None = field("other data that the restore needs", default=None)


class ImageFile(Record):
    """A file of the image."""

    name: str = field("its name in its folder")
    size_bytes: int = field("bytes of memory in it")
    stored_bytes: int = field("bytes on disk, without zeros and compression")
    sum: str = field("in `criu`: SHA-256 over the SHA-256 of each 8 MiB; in `bytes`: SHA-256 of its checksum table")


class Manifest(Record):
    """The content of manifest.json. Unknown keys are ignored."""

    format: str = field("always hegm-image", default=FORMAT)
    version: int = field("version of the directory's format", default=VERSION)
    id: str = field("identifies this image", default="")
    made_utc: float | None = field("when it was completed", default=None)
    uid: int = field("its owner", default=0)
    gid: int = field("its owner's primary group", default=0)
    hegmd_version: str = field("version of hegmd that wrote it", default="")
    host: str = field("the node that wrote it", default="")
    kernel: str = field("kernel of that node", default="")
    architecture: str = field("processor architecture of that node", default="")
    vendor: str | None = field("vendor of the GPUs; null without GPUs", default=None)
    driver_version: str | None = field("version of the GPU driver", default=None)
    gpus: tuple[ImageGpu, ...] = field("the GPUs that the job used", default=())
    criu_version: str = field("version of CRIU that wrote it", default="")
    criu_options: tuple[str, ...] = field("additional options of CRIU", default=())
    root_pid: int = field("root of the dumped process tree", default=0)
    processes: tuple[ImageProcess, ...] = field("the processes of the tree", default=())
    workers: tuple[ImageWorker, ...] = field("the processes with bytes on GPUs", default=())
    leave_running: bool = field("the job continued after the checkpoint", default=False)
    node: Mapping[str, object] | None = field("what a node needs to have in common with the writer's", default=None)
    more: Mapping[str, object] | None = field("other data that the restore needs", default=None)
    criu_files: tuple[ImageFile, ...] = field("files in `criu`", default=())
    byte_files: tuple[ImageFile, ...] = field("files in `bytes`", default=())


class ImageSeen(Record):
    """A directory that is an image, or the rest of one."""

    path: str = field("its path")
    state: str = field("whole; in-use; left-over: its writer ended early; broken")
    why: str | None = field("the problem")
    size_bytes: int | None = field("bytes of memory in the image")
    stored_bytes: int | None = field("bytes on disk")
    made_utc: float | None = field("when it was completed")
    host: str | None = field("the node that wrote it")
    command: str | None = field("command line of its root process")


class ImagesSeen(Record):
    """The answer of `hegmctl images ls`."""

    images: tuple[ImageSeen, ...] = field("the images, by path")


class ImageProgress(Record):
    """The progress of a check of an image."""

    done_bytes: int = field("bytes checked so far")
    size_bytes: int = field("bytes to check")


class ImageVerified(Record):
    """The answer of `hegmctl images verify`: every byte was read and matches its checksum."""

    path: str = field("path of the image")
    size_bytes: int = field("bytes of memory in the image")
    stored_bytes: int = field("bytes that were read")
    took_s: float = field("how long the check took")
    foreign: tuple[str, ...] = field("files in the directory that do not belong to the image", default=())


class ImageRemoved(Record):
    """The answer of `hegmctl images rm`."""

    paths: tuple[str, ...] = field("the removed directories")
