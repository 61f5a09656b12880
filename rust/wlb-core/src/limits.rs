//! The most that a caller may ask for.
//!
//! Beyond each of these a number is a mistyped one: it is an error that names the argument, not an exhausted memory or
//! an overflow. Every limit stands here and nowhere else; the Python package reads them from here.

/// Tokens of the longest document and of the longest packed sequence: `cu_seqlens` are int32 in every varlen attention
/// kernel. So a window of as many keys, or of more, hides nothing: wherever one is given, it means no window. A chunk
/// likewise.
pub const MAX_TOKENS: i64 = i32::MAX as i64;

/// Micro-batches of one global batch, or of the global batches that are packed together.
pub const MAX_MICRO_BATCHES: usize = 1 << 20;

/// Columns of costs that documents are given: resources with a barrier of their own.
pub const MAX_COLUMNS: usize = 64;

/// Cuts that a push or a split makes, and so pieces more than documents.
pub const MAX_CUTS: i64 = 1 << 23;

/// Iterations of a packer's stream, and of a delay: exact in any JSON reader.
pub const MAX_ITERATION: u64 = 1 << 53;

/// Levels of the queue that tuning looks for: it tries every combination of thresholds.
pub const MAX_QUEUES: usize = 4;

/// Ranks of a context-parallel group.
pub const MAX_CP_SIZE: usize = 1 << 16;

/// Ranks of one pipeline stage whose documents Dynamic-CP divides among groups of them.
pub const MAX_WORLD_SIZE: usize = 1 << 20;

/// Pipeline ranks.
pub const MAX_STAGES: usize = 1 << 12;

/// (micro-batch, stage) pairs of one step of a pipeline, and (micro-batch, rank) pairs of a Dynamic-CP plan.
pub const MAX_CELLS: usize = 1 << 22;

/// Heads, head width and tile of an attention kernel.
pub const MAX_KERNEL_SIZE: i64 = 1 << 20;
