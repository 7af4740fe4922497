"""The laboratory: data, backbones, training, studies, reports and the command line.

Everything here may import the rest of the package; nothing outside may import this. Its libraries
come with the extra: ``pip install "sigmanens[lab]"``.
"""
