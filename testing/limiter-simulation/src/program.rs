//! What programs do.

/// When a process waits for what it launched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pattern {
    /// After every launch, and computes for so long (ns) before the next.
    Sync {
        /// Time of the CPU between two launches.
        gap: u64,
    },
    /// Never: launches as long as the driver takes them (1024 at a time).
    Async,
    /// After so many launches.
    Batch {
        /// How many.
        launches: u32,
    },
    /// Never, and each launch is a graph of many kernels, known only as a whole.
    Graph,
    /// Launches, goes away for so long (ns), launches again, and never waits for anything.
    Sparse {
        /// Time between two launches.
        every: u64,
    },
}

/// What each process of a container runs.
#[derive(Debug, Clone)]
pub struct Program {
    /// How long a kernel runs by itself, ns. Each is up to a tenth longer or shorter.
    pub kernel: u64,
    /// One in so many launches of the same kernel takes `tail` instead; 0: none.
    pub tail_every: u32,
    /// How long those run.
    pub tail: u64,
    /// When it waits.
    pub pattern: Pattern,
    /// Streams that launches go to in turn.
    pub streams: usize,
    /// When it launches: from, to (ns).
    pub active: Vec<(u64, u64)>,
}

impl Program {
    /// Kernels of that length in one stream, all the time.
    #[must_use]
    pub fn new(kernel: u64, pattern: Pattern) -> Self {
        Self { kernel, tail_every: 0, tail: 0, pattern, streams: 1, active: vec![(0, u64::MAX)] }
    }

    /// Launches within these times only.
    #[must_use]
    pub fn active(mut self, times: Vec<(u64, u64)>) -> Self {
        self.active = times;
        self
    }

    /// Launches to so many streams in turn.
    #[must_use]
    pub fn streams(mut self, streams: usize) -> Self {
        self.streams = streams;
        self
    }

    /// One in so many launches takes that long.
    #[must_use]
    pub fn tail(mut self, every: u32, kernel: u64) -> Self {
        (self.tail_every, self.tail) = (every, kernel);
        self
    }

    /// The next time at which it may launch.
    pub(crate) fn next_active(&self, now: u64) -> u64 {
        self.active.iter().find(|(_, to)| now < *to).map_or(u64::MAX, |(from, _)| now.max(*from))
    }
}
