"""What a user says of a corpus: its name, its files, and what the files do not say themselves.

    [NAME=]PATH[,PATH...][#SPLIT][,OPTION=VALUE...]

    /data/web                                   a token file or a folder of shards
    'web=/data/*_train_*.bin,/more/*.bin'       the files that patterns match
    s3://bucket/web                             the same in an object store, see `docs/stores.md`
    hf://datasets/ORG/NAME@REVISION/web#train   the same in a repository of the Hugging Face Hub
    /data/web#train                             the files of one split, by the words of their names
    hq=/data/web?view=hq.view                   a view of it, see `docs/views.md`
    web=/data/web,dtype=uint32,eot=50256        options
    '/data/a\\,b\\#1.bin'                         a file that is called `a,b#1.bin`

The text alone decides, whatever files there are: NAME ends at the first `=` if no `/`, `,` or `#` is before
it, and `,WORD=` begins an option. A backslash makes one of `,=#*?[` or a backslash after it part of a name.
The options are keys of a table `[corpora.NAME]` in a configuration file, too, and its `path` is all between
NAME and the options.
"""

from corpus_server.corpus_spec.reading import (
    ALL,
    ESCAPES,
    FILES,
    HUB,
    MANIFEST,
    MAX_LICENSE,
    NAME,
    OPTIONS,
    OTHER,
    SPLITS,
    STORE,
    cut_split,
    escaped,
    split_of,
    tokenizer_source,
)
from corpus_server.corpus_spec.spec import CorpusSpec, with_views

__all__ = [
    "ALL",
    "ESCAPES",
    "FILES",
    "HUB",
    "MANIFEST",
    "MAX_LICENSE",
    "NAME",
    "OPTIONS",
    "OTHER",
    "SPLITS",
    "STORE",
    "CorpusSpec",
    "cut_split",
    "escaped",
    "split_of",
    "tokenizer_source",
    "with_views",
]
