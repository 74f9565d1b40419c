//! The words of a command line, and which flags have no influence.

use ithaca_ir::diagnostic::nearest;
use ithaca_ir::{Diagnostic, Diagnostics};

/// A refusal of arguments.
pub(super) fn refusal(message: impl Into<String>) -> Diagnostic {
    Diagnostic::new("C21", message)
}

/// A flag with its values.
#[derive(Clone, Debug)]
struct Flag {
    name: String,
    values: Vec<String>,
    is_read: bool,
}

/// Flags that are read one by one.
#[derive(Debug)]
pub(super) struct Flags {
    flags: Vec<Flag>,
    ignore: Vec<String>,
    /// The names that were asked for.
    known: Vec<String>,
    wrong: Diagnostics,
}

/// Splits a command line into words as a shell does: quotes, and backslashes at ends of lines. Words before the first flag, such as the
/// launcher's, are left out.
pub fn words(text: &str) -> Vec<String> {
    let mut words: Vec<String> = Vec::new();
    let mut word: Option<String> = None;
    let mut quote = None;
    let mut is_comment = false;
    let mut letters = text.chars().peekable();
    while let Some(c) = letters.next() {
        match (c, quote) {
            ('\n', _) if is_comment => is_comment = false,
            _ if is_comment => {}
            (c, Some(q)) if c == q => quote = None,
            ('\'' | '"', None) => {
                quote = Some(c);
                word.get_or_insert_default();
            }
            ('\\', None) => match letters.next() {
                Some('\n') | None => {}
                Some(c) => word.get_or_insert_default().push(c),
            },
            ('#', None) if word.is_none() => is_comment = true,
            (c, None) if c.is_whitespace() => words.extend(word.take()),
            (c, _) => word.get_or_insert_default().push(c),
        }
    }
    words.extend(word);
    // Arguments of the launcher are before the script.
    let script = words.iter().rposition(|word| word.ends_with(".py"));
    words.split_off(script.map_or(0, |at| at + 1))
}

/// Flags that change neither time nor memory of a step as it is priced, or the beginnings of their names.
const INERT: &[&str] = &[
    "lr",
    "min-lr",
    "train-iters",
    "train-samples",
    "weight-decay",
    "start-weight-decay",
    "end-weight-decay",
    "clip-grad",
    "adam-",
    "optimizer",
    "init-method-std",
    "log-",
    "save",
    "load",
    "no-load-",
    "no-save-",
    "eval-",
    "data-path",
    "data-args-path",
    "data-cache-path",
    "train-data-path",
    "valid-data-path",
    "test-data-path",
    "mock-data",
    "split",
    "tokenizer-",
    "vocab-file",
    "merge-file",
    "num-workers",
    "seed",
    "tensorboard-",
    "wandb-",
    "exit-",
    "distributed-backend",
    "distributed-timeout",
    "timing-",
    "ckpt-",
    "async-save",
    "dist-ckpt-",
    "override-opt",
    "use-checkpoint-",
    "finetune",
    "use-mcore-models",
    "transformer-impl",
    "attention-backend",
    "use-flash-attn",
    "no-masked-softmax-fusion",
    "no-bias-",
    "no-rope-fusion",
    "no-persist-layer-norm",
    "no-gradient-accumulation-fusion",
    "no-async-tensor-model-parallel-allreduce",
    "no-create-attention-mask-in-dataloader",
    "apply-layernorm-1p",
    "cross-entropy-loss-fusion",
    "cross-entropy-fusion-impl",
    "manual-gc",
    "profile",
    "make-vocab-size-divisible-by",
    "overlap-",
    "tp-comm-overlap",
    "ddp-",
    "attention-softmax-in-fp32",
    "megatron-fsdp-grad-comm-dtype",
    "initial-loss-scale",
    "loss-scale",
    "moe-aux-loss-coeff",
    "moe-z-loss-coeff",
    "moe-permute-fusion",
    "moe-router-dtype",
    "moe-router-load-balancing-type",
    "moe-grouped-gemm",
    "moe-token-dispatcher-type",
    "local-rank",
    "nccl-communicator-config-path",
    "high-priority-stream-groups",
    "dataloader-type",
    "eod-mask-loss",
    "calculate-per-token-loss",
    "enable-experimental",
    "no-mmap-bin-files",
    "max-position-embeddings",
    "no-check-for-nan-in-loss-and-grad",
    "check-for-nan-in-loss-and-grad",
    "empty-unused-memory-level",
];

impl Flags {
    pub(super) fn new(words: &[String], ignore: &[String]) -> Self {
        let mut flags: Vec<Flag> = Vec::new();
        let mut wrong = Vec::new();
        for word in words {
            match (word.strip_prefix("--"), flags.last_mut()) {
                (Some(""), _) => {}
                (Some(flag), _) => {
                    let (name, value) =
                        flag.split_once('=').map_or((flag, None), |(name, value)| (name, Some(value)));
                    let values = value.map(str::to_owned).into_iter().collect();
                    flags.push(Flag { name: name.replace('_', "-"), values, is_read: false });
                }
                // Words of the shell are data of other scripts.
                (None, _) if word.starts_with('$') => {}
                (None, Some(flag)) => flag.values.push(word.clone()),
                (None, None) => wrong.push(refusal(format!("`{word}` stands before the first flag"))),
            }
        }
        let ignore = ignore.iter().map(|name| name.trim_start_matches('-').replace('_', "-")).collect();
        Self { flags, ignore, known: Vec::new(), wrong }
    }

    fn find(&mut self, name: &str) -> Option<Vec<String>> {
        self.known.push(name.to_owned());
        let mut found = None;
        for flag in self.flags.iter_mut().filter(|flag| flag.name == name) {
            flag.is_read = true;
            // The last one counts.
            found = Some(flag.values.clone());
        }
        found
    }

    /// Whether a flag without a value is given.
    pub(super) fn flag(&mut self, name: &str) -> bool {
        let values = self.find(name);
        if let Some(value) = values.iter().flatten().next() {
            self.wrong.push(refusal(format!("`--{name}` takes no value, and `{value}` follows it")));
        }
        values.is_some()
    }

    /// The values of a flag.
    pub(super) fn words(&mut self, name: &str) -> Vec<String> {
        self.find(name).unwrap_or_default()
    }

    /// The value of a flag.
    pub(super) fn word(&mut self, name: &str) -> Option<String> {
        let values = self.find(name)?;
        if let [value] = values.as_slice() {
            return Some(value.clone());
        }
        self.wrong.push(refusal(format!("`--{name}` takes one value, and has {}", values.len())));
        None
    }

    /// The value of a flag that is a whole number.
    pub(super) fn number(&mut self, name: &str) -> Option<u64> {
        let word = self.word(name)?;
        let number = word.parse().ok().filter(|n| (1..=1 << 40).contains(n));
        if number.is_none() {
            self.wrong.push(refusal(format!("`--{name} {word}` is not a whole number of at least 1")));
        }
        number
    }

    /// The value of a flag that is a number.
    pub(super) fn real(&mut self, name: &str) -> Option<f64> {
        let word = self.word(name)?;
        let number = word.parse::<f64>().ok().filter(|x| x.is_finite());
        if number.is_none() {
            self.wrong.push(refusal(format!("`--{name} {word}` is not a number")));
        }
        number
    }

    /// Refuses a flag that was not understood.
    pub(super) fn refuse(&mut self, diagnostic: Diagnostic) {
        self.wrong.push(diagnostic);
    }

    /// Notes on flags without influence, and refusals of all that were not asked for.
    pub(super) fn finish(self) -> (Vec<String>, Diagnostics) {
        let Self { flags, ignore, known, mut wrong } = self;
        let is_inert = |name: &str| {
            let matches =
                |inert: &&str| if inert.ends_with('-') { name.starts_with(*inert) } else { name == *inert };
            INERT.iter().any(matches)
                || ignore.iter().any(|other| other == name)
                || INERT.iter().any(|i| is_variant(i, name))
        };
        let mut inert = Vec::new();
        for flag in flags.iter().filter(|flag| !flag.is_read) {
            if is_inert(&flag.name) {
                inert.push(format!("--{}", flag.name));
                continue;
            }
            let name = &flag.name;
            let near = nearest(name, known.iter().map(String::as_str));
            let help = near.map_or_else(
                || format!("declare that it changes neither time nor memory by `--ignore-flag {name}`"),
                |near| format!("did you mean `--{near}`? else declare that it has no influence by `--ignore-flag {name}`"),
            );
            wrong.push(
                refusal(format!("`--{name}` may change the computation, and is not understood")).help(help),
            );
        }
        inert.sort();
        inert.dedup();
        let notes = match inert.as_slice() {
            [] => Vec::new(),
            some => vec![format!("ignored, for they change no price: {}", some.join(" "))],
        };
        (notes, wrong)
    }
}

/// Whether a name is that of a family of flags: `lr-decay-iters` is of `lr`, `save-interval` of `save`.
fn is_variant(family: &str, name: &str) -> bool {
    const FAMILIES: [&str; 11] = [
        "lr",
        "save",
        "load",
        "split",
        "profile",
        "manual-gc",
        "optimizer",
        "ckpt-",
        "tp-comm-overlap",
        "mock-data",
        "seed",
    ];
    FAMILIES.contains(&family) && name.starts_with(family) && name[family.len()..].starts_with('-')
}
