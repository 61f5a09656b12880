//! Errors about the arguments of a caller.

use thiserror::Error as ThisError;

/// Result of the functions of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// A bad argument. The variants have fields instead of one sentence, so that a binding can hand the fields on.
#[derive(Clone, Debug, PartialEq, ThisError)]
pub enum Error {
    /// A document has no tokens, a negative number of them, or more than int32 `cu_seqlens` can count.
    #[error("{argument}[{index}] = {value}: a document has from 1 to 2147483647 tokens{}", of_cu_seqlens(*index, *value))]
    #[allow(missing_docs)]
    Length { argument: &'static str, index: usize, value: i64 },

    /// A document is longer than a limit that the caller set. `given` names that limit as the caller wrote it (the
    /// limit may have been derived from another argument).
    #[error("{argument}[{index}] = {value} exceeds {given}{hint}")]
    #[allow(missing_docs)]
    TooLong { argument: &'static str, index: usize, value: i64, given: String, limit: i64, hint: &'static str },

    /// A group that stays in one micro-batch is larger than a micro-batch may be. `index` is its first document,
    /// `value` its number, `size` its tokens or documents; `given` names the limit `limit` as the caller wrote it.
    #[error(
        "groups[{index}] = {value}: the {size} {of} of this group exceed {given}; together=\"micro_batch\" keeps a \
         group in one micro-batch: raise {limit}, or keep groups on one rank (together=\"rank\")"
    )]
    #[allow(missing_docs)]
    GroupTooLarge { index: usize, value: i64, size: i64, of: &'static str, given: String, limit: &'static str },

    /// The documents of one packed sequence have more tokens together than int32 `cu_seqlens` can count.
    #[error("{argument} holds {total} tokens in all: a packed sequence has at most 2147483647 (cu_seqlens are int32)")]
    #[allow(missing_docs)]
    TotalTooLong { argument: &'static str, total: i64 },

    /// A number is outside its range.
    #[error("{argument} = {value}: must be from {minimum} to {maximum}")]
    #[allow(missing_docs)]
    OutOfRange { argument: &'static str, value: i64, minimum: i64, maximum: i64 },

    /// A real number is not finite, or outside its range.
    #[error("{argument} = {}: {requirement}", shown(*value))]
    #[allow(missing_docs)]
    Number { argument: &'static str, value: f64, requirement: &'static str },

    /// One entry of a sequence does not fit the others.
    #[error("{argument}[{index}] = {}: {requirement}", shown(*value))]
    #[allow(missing_docs)]
    Entry { argument: &'static str, index: usize, value: f64, requirement: &'static str },

    /// One entry of a table does not fit the others. Without a column: one entry of a sequence.
    #[error(
        "{argument}[{row}{}] = {}: {requirement}",
        .column.map_or(String::new(), |column| format!(", {column}")), shown(*value)
    )]
    #[allow(missing_docs)]
    Cell { argument: &'static str, row: usize, column: Option<usize>, value: f64, requirement: &'static str },

    /// All entries of one column of a table are wrong together.
    #[error("{argument}[:, {column}]: {requirement}")]
    #[allow(missing_docs)]
    Column { argument: &'static str, column: usize, requirement: &'static str },

    /// A micro-batch has more tokens than the largest size that it may run with.
    #[error(
        "token_buckets[{index}] = {value}: this micro-batch has {tokens} tokens, more than the largest size; give the \
         packer the same sizes"
    )]
    #[allow(missing_docs)]
    NoBucket { index: usize, value: i64, tokens: i64 },

    /// Two sequences that belong together have different lengths.
    #[error("{argument} has {found} entries, but {other} has {expected}")]
    #[allow(missing_docs)]
    Mismatch { argument: &'static str, found: usize, other: &'static str, expected: usize },

    /// Samples that should share a token have different tokens there.
    #[error(
        "{argument}[{index}] = {value}: token {position} of sample {sample} is {expected} in sample {other}, but the \
         forest says that they share it; build it from tokens, or with other groups"
    )]
    #[allow(missing_docs)]
    Unlike {
        argument: &'static str,
        index: usize,
        value: i64,
        sample: usize,
        position: usize,
        other: usize,
        expected: i64,
    },

    /// An id appears twice in one push, or belongs to a document that is still waiting.
    #[error("{argument}[{index}] = {value}: this id {clash}")]
    #[allow(missing_docs)]
    DuplicateId { argument: &'static str, index: usize, value: i64, clash: &'static str },

    /// A name that is none of the choices.
    #[error("{argument} = {value:?}: must be one of {choices}")]
    #[allow(missing_docs)]
    Choice { argument: &'static str, value: String, choices: String },

    /// An argument is missing or must not be given, because of the value of another argument.
    #[error("{argument}: {requirement}")]
    #[allow(missing_docs)]
    Combination { argument: &'static str, requirement: &'static str },

    /// Micro-batches cannot be dealt to the ranks in equal numbers.
    #[error("{argument} = {value}: does not divide the {total} micro-batches")]
    #[allow(missing_docs)]
    Indivisible { argument: &'static str, value: i64, total: usize },

    /// Not all documents fit, where all have to be packed.
    ///
    /// `given` is the caller's `max_tokens` in words, `enough` a `max_tokens` that holds all documents, and `whole`
    /// says what `num_micro_batches=None` does. `num_micro_batches=None` does.
    #[error(
        "lengths: {documents} of {all} documents ({tokens} tokens) do not fit into {micro_batches} micro-batches of \
         {given}, the first of them lengths[{index}] = {value}; {}leftover=\"return\" packs the others, and lists what \
         is left over",
        remedy(*enough, *whole)
    )]
    #[allow(missing_docs)]
    LeftOver {
        documents: usize,
        all: usize,
        tokens: i64,
        micro_batches: usize,
        given: String,
        index: usize,
        value: i64,
        enough: Option<i64>,
        whole: Option<&'static str>,
    },

    /// A schedule does not take this number of stages or micro-batches.
    #[error("{argument} = {value}: schedule={schedule:?} {requirement}")]
    #[allow(missing_docs)]
    Schedule { argument: &'static str, value: i64, schedule: &'static str, requirement: &'static str },

    /// No pipeline can run this order of ops.
    #[error("orders[{rank}][{position}]: {problem}")]
    #[allow(missing_docs)]
    Order { rank: usize, position: usize, problem: &'static str },

    /// The cost model gives infinite work.
    #[error("{argument}[{index}] = {value}: the cost model gives this document infinite cost")]
    #[allow(missing_docs)]
    InfiniteCost { argument: &'static str, index: usize, value: i64 },

    /// More documents wait in a packer than its bounds allow.
    #[error(
        "{pending_tokens} tokens wait after this push, more than the {bound} of packer.bounds(): documents arrive \
         faster than they fit into the micro-batches. Push no more than packer.admits(lengths) says (push([]) trains \
         of what waits), or raise max_tokens"
    )]
    #[allow(missing_docs)]
    Backlog { pending_tokens: i64, bound: i64 },

    /// A profile lacks a part, or a part of it is wrong.
    #[error("profile: {path}: {problem}")]
    #[allow(missing_docs)]
    Profile { path: String, problem: String },

    /// A saved packer cannot be read: it is corrupt, truncated, of another version, or not a packer.
    #[error("state: {path}: {problem}")]
    #[allow(missing_docs)]
    State { path: String, problem: String },

    /// The caller's `keep_going` said no between two candidates of tuning ([`crate::tune`]).
    #[error("interrupted")]
    Interrupted,

    /// A saved packer had another configuration than the packer that loads it.
    #[error(
        "state: saved under another configuration ({fields}); \
         pass allow_config_change=True to go on under the new one"
    )]
    #[allow(missing_docs)]
    ConfigChanged { fields: String },
}

/// `cu_seqlens` begin with a 0, lengths cannot.
fn of_cu_seqlens(index: usize, value: i64) -> &'static str {
    if (index, value) == (0, 0) { "; if these are cu_seqlens, pass np.diff(cu_seqlens)" } else { "" }
}

impl Error {
    /// The argument that is wrong.
    pub fn argument(&self) -> &'static str {
        match self {
            Self::Length { argument, .. }
            | Self::TooLong { argument, .. }
            | Self::TotalTooLong { argument, .. }
            | Self::OutOfRange { argument, .. }
            | Self::Number { argument, .. }
            | Self::Entry { argument, .. }
            | Self::Cell { argument, .. }
            | Self::Column { argument, .. }
            | Self::Mismatch { argument, .. }
            | Self::DuplicateId { argument, .. }
            | Self::Unlike { argument, .. }
            | Self::Choice { argument, .. }
            | Self::Combination { argument, .. }
            | Self::Indivisible { argument, .. }
            | Self::Schedule { argument, .. }
            | Self::InfiniteCost { argument, .. } => argument,
            Self::LeftOver { .. } => "lengths",
            Self::GroupTooLarge { .. } => "groups",
            Self::NoBucket { .. } => "token_buckets",
            Self::Order { .. } => "orders",
            Self::Profile { .. } => "profile",
            Self::Backlog { .. } => "lengths",
            Self::State { .. } | Self::ConfigChanged { .. } => "state",
            Self::Interrupted => "",
        }
    }

    /// Index in the argument, if it is a sequence.
    pub fn index(&self) -> Option<usize> {
        match self {
            Self::Length { index, .. }
            | Self::TooLong { index, .. }
            | Self::GroupTooLarge { index, .. }
            | Self::Entry { index, .. }
            | Self::DuplicateId { index, .. }
            | Self::Unlike { index, .. }
            | Self::LeftOver { index, .. }
            | Self::NoBucket { index, .. }
            | Self::InfiniteCost { index, .. } => Some(*index),
            Self::Cell { row, .. } => Some(*row),
            Self::Order { rank, .. } => Some(*rank),
            _ => None,
        }
    }
}

/// End of an error's sentence: a `max_tokens` that holds all documents.
fn remedy(enough: Option<i64>, whole: Option<&str>) -> String {
    match (enough, whole) {
        (Some(enough), Some(_)) => format!("max_tokens={enough} or num_micro_batches=None holds them all; "),
        (Some(enough), None) => format!("max_tokens={enough} holds them all; "),
        (None, Some(whole)) => format!("{whole}; "),
        (None, None) => String::new(),
    }
}

/// A number for an error message: very large and very small numbers in short form.
pub fn shown(value: f64) -> String {
    let size = value.abs();
    if size == 0.0 || (1e-5..1e16).contains(&size) || !size.is_finite() {
        value.to_string()
    } else {
        format!("{value:e}")
    }
}

/// Checks that a whole number lies in `minimum..=maximum`.
pub(crate) fn check_range(argument: &'static str, value: i64, minimum: i64, maximum: i64) -> Result<()> {
    if (minimum..=maximum).contains(&value) {
        Ok(())
    } else {
        Err(Error::OutOfRange { argument, value, minimum, maximum })
    }
}

/// A size as int64 for an error message; a larger size becomes the largest int64, which is out of any range.
pub(crate) fn saturating_i64(value: usize) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

/// Makes an enum of named choices: `FromStr` whose error lists them, and `as_str`.
macro_rules! named_choices {
    ($(#[$meta:meta])* $name:ident, $argument:literal {
        $($(#[$doc:meta])* $variant:ident = $text:literal),+ $(,)?
    }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
        pub enum $name {
            $($(#[$doc])* #[serde(rename = $text)] $variant),+
        }

        impl $name {
            /// All choices, as a user writes them.
            pub const NAMES: &[&str] = &[$($text),+];

            /// The name that a user writes.
            pub fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $text),+ }
            }
        }

        impl std::str::FromStr for $name {
            type Err = $crate::error::Error;

            fn from_str(value: &str) -> $crate::error::Result<Self> {
                match value {
                    $($text => Ok(Self::$variant),)+
                    _ => Err($crate::error::Error::Choice {
                        argument: $argument,
                        value: value.to_owned(),
                        choices: [$($text),+].map(|choice| format!("{choice:?}")).join(", "),
                    }),
                }
            }
        }
    };
}
pub(crate) use named_choices;

/// Reads JSON; on failure says where (`carried.lengths[3]`) and what.
pub(crate) fn from_json<'de, T: serde::Deserialize<'de>>(json: &'de str) -> std::result::Result<T, (String, String)> {
    let mut deserializer = serde_json::Deserializer::from_str(json);
    let top = || "at the top".to_owned();
    let value = serde_path_to_error::deserialize(&mut deserializer).map_err(|error| {
        let path = error.path().to_string();
        (if path == "." { top() } else { path }, error.inner().to_string())
    })?;
    deserializer.end().map_err(|error| (top(), error.to_string()))?;
    Ok(value)
}
