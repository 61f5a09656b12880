//! The most that a caller may ask for.
//!
//! Beyond each of these a number is a mistyped one: it is an error that names the argument, not an exhausted memory or
//! an overflow. Every limit stands here and nowhere else; the Python package reads them from here.

/// Most tokens of a document and of a packed sequence: `cu_seqlens` are int32 in every varlen attention kernel. A
/// window or chunk of at least this many tokens hides no key, so wherever a window or chunk is given, this size means
/// "none".
pub const MAX_TOKENS: i64 = i32::MAX as i64;

/// Most micro-batches of one global batch, or of several global batches that are packed together.
pub const MAX_MICRO_BATCHES: usize = 1 << 20;

/// Most columns of costs that documents may bring: one column for each resource with a barrier of its own.
pub const MAX_COLUMNS: usize = 64;

/// Most cuts that one push or one split makes, so at most this many more pieces than documents.
pub const MAX_CUTS: i64 = 1 << 23;

/// Most iterations of a packer's stream, and most iterations of delay: such an integer is exact in any JSON reader.
pub const MAX_ITERATION: u64 = 1 << 53;

/// Most levels of the queue that tuning looks for: tuning tries every combination of thresholds.
pub const MAX_QUEUES: usize = 4;

/// Most ranks of a context-parallel group.
pub const MAX_CP_SIZE: usize = 1 << 16;

/// Most ranks of one pipeline stage that Dynamic-CP divides into groups.
pub const MAX_WORLD_SIZE: usize = 1 << 20;

/// Most pipeline ranks.
pub const MAX_STAGES: usize = 1 << 12;

/// Most (micro-batch, stage) pairs of one step of a pipeline, and most (micro-batch, rank) pairs of a Dynamic-CP plan.
pub const MAX_CELLS: usize = 1 << 22;

/// Most heads, greatest head width and greatest tile of an attention kernel.
pub const MAX_KERNEL_SIZE: i64 = 1 << 20;
