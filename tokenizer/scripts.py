"""Scripts that put no blank between words: where words are counted, each of their characters is one."""

# First and last code points.
UNSPACED = (
    *((0x0E00, 0x0FFF), (0x1000, 0x109F), (0x1780, 0x17FF), (0x1950, 0x19FF), (0x1A20, 0x1AAF)),  # Thai to Tai Tham
    *((0xA9E0, 0xA9FF), (0xAA60, 0xAADF)),  # Myanmar's further letters, Tai Viet
    *((0x3040, 0x30FF), (0x31F0, 0x31FF), (0xFF66, 0xFF9F), (0x1B000, 0x1B16F)),  # kana
    *((0x3005, 0x3007), (0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF), (0x20000, 0x3FFFF)),  # Han
    (0xA000, 0xA4CF),  # Yi
)
UNSPACED_CLASS = "".join(f"{chr(first)}-{chr(last)}" for first, last in UNSPACED)  # between the brackets of a pattern
