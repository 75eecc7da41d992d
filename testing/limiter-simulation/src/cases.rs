//! A container with a cap, alone or with a co-tenant, and the accuracy of the cap.

use tessera_intercept_abi::ComputePolicy;

use crate::gpu::GpuSpec;
use crate::limiter::Limiter;
use crate::program::{Pattern, Program};
use crate::record::Record;
use crate::world::{Container, Host, World};
use crate::{MS, S};

/// Co-tenant on the GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CoTenant {
    /// No co-tenant.
    None,
    /// A container with a cap of [`CoTenant::CAP_PERCENT`] and the kernels of [`Self::Unlimited`].
    Capped,
    /// A container without limit that launches kernels of 1 ms all the time (10 ms beside kernels
    /// of 50 ms and more).
    Unlimited,
}

impl CoTenant {
    /// Cap of [`CoTenant::Capped`] in percent.
    pub const CAP_PERCENT: u32 = 10;

    /// Returns its limiter and its cap in percent. `None` without a co-tenant.
    const fn limit(self) -> Option<(Limiter, u32)> {
        match self {
            Self::None => None,
            Self::Capped => Some((Limiter::Tessera(ComputePolicy::Fixed), Self::CAP_PERCENT)),
            Self::Unlimited => Some((Limiter::Tessera(ComputePolicy::None), 100)),
        }
    }
}

/// Workload of the limited container.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Workload {
    /// Run time of its kernels in ns.
    pub kernel: u64,
    /// Synchronisation pattern.
    pub pattern: Pattern,
    /// Number of processes.
    pub processes: usize,
    /// Number of streams of each process, to which launches go in turn.
    pub streams: usize,
    /// Part of the SMs that each kernel fills, in percent of the GPU.
    pub fill_percent: u32,
    /// Co-tenant.
    pub co_tenant: CoTenant,
}

/// Accuracy of a cap. Shares of a GPU are from 0 to 1.
#[derive(Debug, Clone, Copy)]
pub struct Accuracy {
    /// The cap, or the share that the workload uses without a cap if that is lower.
    pub expected: f64,
    /// Measured share.
    pub actual: f64,
    /// Largest error over windows of 1 s, or of 20 kernels per process if that is longer.
    pub short: f64,
    /// Largest error over windows of 5 s, or of 50 kernels per process if that is longer.
    pub long: f64,
    /// Part that the co-tenant got of the time that the workload leaves, or of its cap if that is
    /// less. Context switches belong to no container.
    pub co_tenant: Option<f64>,
}

/// Time after which limiters have warmed up.
const WARM_UP: u64 = S;

impl Workload {
    /// Returns a process that launches kernels that fill the GPU in one stream, alone on it.
    #[must_use]
    pub const fn new(kernel: u64, pattern: Pattern) -> Self {
        Self {
            kernel,
            pattern,
            processes: 1,
            streams: 1,
            fill_percent: 100,
            co_tenant: CoTenant::None,
        }
    }

    fn program(&self) -> Program {
        Program::new(self.kernel, self.pattern).streams(self.streams).fill(self.fill_percent)
    }

    /// Returns the lengths of the two windows of the error. A running kernel cannot be stopped, so
    /// no limiter can hold a cap over the time of a few kernels.
    #[must_use]
    pub fn windows(&self) -> (u64, u64) {
        let round = self.kernel * self.processes as u64;
        (S.max(20 * round), (5 * S).max(50 * round))
    }

    /// Returns the time after which the cap can hold. Each process's first launches of a kernel run
    /// before their length is known (one at once, and another at each timeout), and are charged
    /// afterwards.
    fn warm_up(&self, percent: u32) -> u64 {
        let processes = self.processes as u64;
        let first = (2 * processes * self.kernel / S + 1).ilog2() as u64 + 1;
        let paid = (first * processes + 1) * self.kernel * 100 / u64::from(percent);
        WARM_UP.max(2 * paid).next_multiple_of(Record::STEP)
    }

    fn end(&self, percent: u32) -> u64 {
        self.warm_up(percent) + self.windows().1 + S
    }
}

/// Runs a workload under a limiter and returns the world. The workload is container 0.
#[must_use]
pub fn run(workload: &Workload, limiter: Limiter, percent: u32, seed: u64) -> World {
    let mut world = World::new(GpuSpec::default(), Host::default(), seed);
    let container = Container::new(workload.program(), limiter, percent);
    world.add(Container { processes: workload.processes, ..container });
    if let Some((limiter, percent)) = workload.co_tenant.limit() {
        let kernel = if workload.kernel < 50 * MS { MS } else { 10 * MS };
        let program = Program::new(kernel, Pattern::Async);
        world.add(Container::new(program, limiter, percent));
    }
    world.run(workload.end(percent));
    world
}

/// Returns the share of the GPU that the workload uses without a limit.
#[must_use]
pub fn unlimited(workload: &Workload, seed: u64) -> f64 {
    let world = run(workload, Limiter::None, 100, seed);
    world.record().part(0, workload.warm_up(100), workload.end(100))
}

/// Measures the accuracy of a limiter with a workload.
#[must_use]
pub fn measure(
    workload: &Workload,
    limiter: Limiter,
    percent: u32,
    unlimited: f64,
    seed: u64,
) -> Accuracy {
    let world = run(workload, limiter, percent, seed);
    let expected = unlimited.min(f64::from(percent) / 100.0);
    let (short, long) = workload.windows();
    let (start, end) = (workload.warm_up(percent), workload.end(percent));
    let record = world.record();
    let co_tenant = workload.co_tenant.limit().map(|(_, percent)| {
        let left = 1.0 - expected - record.switching(start, end);
        record.part(1, start, end) / left.min(f64::from(percent) / 100.0)
    });
    Accuracy {
        expected,
        actual: record.part(0, start, end),
        short: record.worst(0, expected, short, start),
        long: record.worst(0, expected, long, start),
        co_tenant,
    }
}
