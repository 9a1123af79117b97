"""Where a model takes images otherwise than as a batch of them, and in which order its tokens lie.

towers        packed patches of towers of vision-language models, and what a language model receives
packed_order  the order of packed tokens, and their attention
clips         modules of clips
clip_order    the order of a clip's tokens, and attention within frames and over time
"""
