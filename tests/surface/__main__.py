"""Write the files of the public surface anew."""

from tests.surface import HERE, SURFACES, text_of

for name in SURFACES:
    (HERE / name).write_text(text_of(name))
