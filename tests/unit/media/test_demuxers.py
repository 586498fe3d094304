"""S5: a medium is opened as what its first bytes say, and as nothing else: FFmpeg would try all
that it knows, of which some open ports, addresses and files that the medium names."""

import io
import struct
import threading
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
from media_files import film, recipe_of, tone

from relax_hpc.data.media.canonical import canonical, measure_media
from relax_hpc.data.media.source import MediaSource
from relax_hpc.errors import ConfigError

LOOKS = {"MP4": b"v=0\nftypjp2 ", "MP4 of a box": struct.pack(">I", 24) + b"ftypisom",
         "WEBM": b"\x1a\x45\xdf\xa3"}  # fmt: skip
SESSION = (
    b"\nv=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\n"
    b"m=video 19998 RTP/AVP 96\na=rtpmap:96 H264/90000\n"
)
PLAYLISTS = {
    "SDP": SESSION,
    "DASH": b'\n<?xml version="1.0"?>\n<MPD xmlns="urn:mpeg:dash:schema:mpd:2011"><Period>'
    b"<AdaptationSet><Representation><BaseURL>file://{secret}</BaseURL></Representation>"
    b"</AdaptationSet></Period></MPD>\n",
    "HLS": b"\n#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\nfile://{secret}\n#EXT-X-ENDLIST\n",
    "concat": b"\nffconcat version 1.0\nfile '{secret}'\nfile subfile,,start,0,end,9,,:{secret}\n",
}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    return recipe_of(
        tmp_path_factory.mktemp("m"), "qwen3_omni_moe", advanced={"audio_in_video": True}
    )


@contextmanager
def opened_meanwhile():
    """What this process has open during the block, and had not before."""
    before, found, over = open_now(), set(), threading.Event()

    def look():
        while not over.wait(0.01):
            found.update(open_now())

    watch = threading.Thread(target=look)
    watch.start()
    try:
        yield found
    finally:
        over.set()
        watch.join()
        found -= before


def open_now():
    found = set()
    for each in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # it is closed
            found.add(str(each.readlink()))
    return {name for name in found if not name.startswith("/proc/")}


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("playlist", PLAYLISTS)
def test_a_list_of_addresses_that_begins_as_a_video_opens_none_of_them(
    recipe, tmp_path, look, playlist
):
    """S5: as SDP an MP4 listened on two ports for 21 s, one of them on every address."""
    secret = tmp_path / "secret.mp4"
    secret.write_bytes(film(heard_s=2.0))
    data = LOOKS[look] + PLAYLISTS[playlist].replace(b"{secret}", str(secret).encode())
    for of_video in (False, True):
        modality = "audio" if of_video else "video"
        source = MediaSource("x.jsonl, line 3: video 1", modality, data=data, is_of_video=of_video)
        with opened_meanwhile() as found, pytest.raises(ConfigError, match="cannot be decoded"):
            measure_media([source], recipe)
        assert not found


def test_a_video_whose_frames_lie_in_another_file_is_not_decoded_from_there(recipe, tmp_path):
    """S5: QuickTime's data references, which here name the very file."""
    (tmp_path / "there.mp4").write_bytes(whole := film(heard_s=2.0))
    name = b"file://" + str(tmp_path / "there.mp4").encode() + b"\0"
    url = struct.pack(">I4sI", 12 + len(name), b"url ", 0) + name
    old = struct.pack(">I4sI", 12, b"url ", 1)
    assert old in whole
    grown = len(url) - len(old)
    data = bytearray(whole.replace(old, url))
    for box in (b"moov", b"trak", b"mdia", b"minf", b"dinf", b"dref"):
        at = -1
        while (at := data.find(box, at + 1)) >= 0:
            times = 2 if box == b"moov" else 1
            (size,) = struct.unpack_from(">I", data, at - 4)
            struct.pack_into(">I", data, at - 4, size + times * grown)
    begin = data.find(b"mdat")
    data[begin + 4 :] = bytes(len(data) - begin - 4)  # nothing is left of the frames here
    source = MediaSource("x.jsonl, line 3: video 1", "video", data=bytes(data))
    with opened_meanwhile() as found, pytest.raises(ConfigError):
        canonical(measure_media([source], recipe)[0], recipe)
    assert not found


@pytest.mark.parametrize("form", ["mp4", "webm"])
def test_a_video_that_is_what_it_looks_like_is_decoded_with_its_sound(recipe, form):
    source = MediaSource("x.jsonl, line 3: video 1", "video", data=film(heard_s=2.0, form=form))
    seen, heard = (canonical(each, recipe) for each in measure_media([source], recipe))
    assert seen.array.any() and heard.extent.mel_frames > 150


def test_a_sound_is_read_as_what_its_first_bytes_say(recipe):
    """S5: libsndfile skips a tag of MP3, and reads whatever comes behind it."""
    import soundfile

    made = io.BytesIO()
    soundfile.write(made, np.sin(np.arange(16000) / 9), 16000, format="AIFF")
    tagged = b"ID3\x04\0\0\0\0\0\x04\0\0\0\0" + made.getvalue()
    source = MediaSource("x.jsonl, line 3: audio 1", "audio", data=tagged)
    with pytest.raises(ConfigError, match="begins as MP3, and is AIFF; replace it"):
        measure_media([source], recipe)
    assert measure_media([source._replace(data=tone(1.0))], recipe)[0].facts.num_samples
