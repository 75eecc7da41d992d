//! Simulated programs.

/// Synchronisation pattern of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pattern {
    /// Waits after every launch, then computes for `gap` ns before the next one.
    Sync {
        /// CPU time between two launches.
        gap: u64,
    },
    /// Never waits: launches until the driver's queue is full (1024 launches).
    Async,
    /// Waits after a number of launches.
    Batch {
        /// Number of launches.
        launches: u32,
    },
    /// Never waits; each launch is a graph of many kernels, which is only known as a whole.
    Graph,
    /// Launches a long kernel in another stream, then `launches` of its kernels, and waits for all.
    Beside {
        /// Run time of the long kernel in ns.
        long: u64,
        /// Number of the other launches.
        launches: u32,
    },
    /// Launches a kernel that ends when the next one, in another stream, has started; waits for
    /// both, as two ranks of a collective in one process.
    Rendezvous,
    /// Launches kernels, then one that ends when the peer on the other GPU has started its own, and
    /// waits: a rank of data-parallel training.
    Rank {
        /// Number of kernels before that one.
        compute: u32,
    },
    /// Never waits; launches at intervals.
    Sparse {
        /// Time between two launches in ns.
        every: u64,
    },
}

/// Program of each process of a container.
#[derive(Debug, Clone)]
pub struct Program {
    /// Mean run time of a kernel in ns. Each kernel is up to a tenth longer or shorter.
    pub kernel: u64,
    /// One of this many launches takes `tail` instead; 0: none.
    pub tail_every: u32,
    /// Run time of those launches in ns.
    pub tail: u64,
    /// Synchronisation pattern.
    pub pattern: Pattern,
    /// Number of streams, to which launches go in turn.
    pub streams: usize,
    /// Part of the SMs that each kernel fills, in percent of the GPU.
    pub fill_percent: u32,
    /// Time for which each kernel runs before the end of the kernel ahead of it (programmatic
    /// dependent launch), in ns.
    pub overlap: u64,
    /// Number of kernels of different shapes, which are launched in turn.
    pub shapes: usize,
    /// GPU time of what follows each launch and is not launched: copies, kernels of kernels. In
    /// ns.
    pub unseen: u64,
    /// CPU time before each synchronisation in ns: the program loads data while the GPU works.
    pub before_sync: u64,
    /// True if its streams take no events, as those of a ninth context.
    pub refuses_events: bool,
    /// Times of activity as (from, to) in ns.
    pub active: Vec<(u64, u64)>,
}

impl Program {
    /// Returns a program that launches kernels of this length in one stream, all the time.
    #[must_use]
    pub fn new(kernel: u64, pattern: Pattern) -> Self {
        Self {
            kernel,
            tail_every: 0,
            tail: 0,
            pattern,
            streams: 1,
            fill_percent: 100,
            overlap: 0,
            shapes: 1,
            unseen: 0,
            before_sync: 0,
            refuses_events: false,
            active: vec![(0, u64::MAX)],
        }
    }

    /// Restricts launches to these times.
    #[must_use]
    pub fn active(mut self, times: Vec<(u64, u64)>) -> Self {
        self.active = times;
        self
    }

    /// Distributes launches over this number of streams.
    #[must_use]
    pub fn streams(mut self, streams: usize) -> Self {
        self.streams = streams;
        self
    }

    /// Makes each kernel fill a part of the SMs.
    #[must_use]
    pub fn fill(mut self, percent: u32) -> Self {
        self.fill_percent = percent;
        self
    }

    /// Makes each kernel start this time before the end of the kernel ahead of it.
    #[must_use]
    pub fn overlap(mut self, overlap: u64) -> Self {
        self.overlap = overlap;
        self
    }

    /// Distributes launches over kernels of this number of shapes.
    #[must_use]
    pub fn shapes(mut self, shapes: usize) -> Self {
        self.shapes = shapes;
        self
    }

    /// Makes each launch cause this GPU time that is not launched.
    #[must_use]
    pub fn unseen(mut self, unseen: u64) -> Self {
        self.unseen = unseen;
        self
    }

    /// Makes it work on the CPU for this time before each synchronisation.
    #[must_use]
    pub fn before_sync(mut self, work: u64) -> Self {
        self.before_sync = work;
        self
    }

    /// Makes its streams refuse events.
    #[must_use]
    pub fn without_events(mut self) -> Self {
        self.refuses_events = true;
        self
    }

    /// Makes one of `every` launches take `kernel` ns.
    #[must_use]
    pub fn tail(mut self, every: u32, kernel: u64) -> Self {
        (self.tail_every, self.tail) = (every, kernel);
        self
    }

    /// Returns the next time at which it may launch.
    pub(crate) fn next_active(&self, now: u64) -> u64 {
        self.active.iter().find(|(_, to)| now < *to).map_or(u64::MAX, |(from, _)| now.max(*from))
    }
}
