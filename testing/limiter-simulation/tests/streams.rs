//! Programs that launch in several streams.

use tessera_intercept_abi::ComputePolicy;
use tessera_intercept_simulation::{
    CoTenant, Container, CpuSpec, GpuSpec, Host, Limiter, MS, Pattern, Program, S, US, Workload,
    World, measure, unlimited,
};

const FIXED: Limiter = Limiter::Tessera(ComputePolicy::Fixed);
const BALANCE: Limiter = Limiter::Tessera(ComputePolicy::Balance);
const NONE: Limiter = Limiter::Tessera(ComputePolicy::None);
/// A host that does not correct what is charged by what NVML reports.
const UNCORRECTED: Host = Host { every: Some(50 * MS), delay: 10 * MS, measures: false };

fn world(spec: GpuSpec, containers: impl IntoIterator<Item = Container>) -> World {
    let mut world = World::new(spec, UNCORRECTED, 3);
    for container in containers {
        world.add(container);
    }
    world
}

/// The most error over windows of 5 s and 1 s in points of the GPU, and the least part of the rest
/// that the co-tenant keeps.
struct Bounds {
    long: f64,
    short: f64,
    co_tenant: f64,
}

/// Asserts that caps hold for kernels in several streams, that fit beside each other or do not.
fn assert_caps_hold(pattern: Pattern, co_tenant: CoTenant, bounds: &Bounds) {
    let mut violations = Vec::new();
    for kernel in [20 * US, 200 * US, 2 * MS] {
        for (streams, fill_percent) in [(2, 12), (2, 60), (8, 12), (8, 60)] {
            for (processes, percents) in [(1, &[10, 30, 70][..]), (3, &[30, 70])] {
                let workload = Workload {
                    processes,
                    streams,
                    fill_percent,
                    co_tenant,
                    ..Workload::new(kernel, pattern)
                };
                let free = unlimited(&workload, 7);
                for percent in percents {
                    let accuracy = measure(&workload, FIXED, *percent, free, 7);
                    let holds = accuracy.long <= bounds.long
                        && accuracy.short <= bounds.short
                        && accuracy.co_tenant.is_none_or(|part| part >= bounds.co_tenant);
                    if !holds {
                        violations.push(format!("{workload:?} at {percent} %: {accuracy:?}"));
                    }
                }
            }
        }
    }
    assert!(violations.is_empty(), "{}", violations.join("\n"));
}

#[test]
fn caps_hold_for_busy_streams_alone() {
    let bounds = Bounds { long: 0.035, short: 0.1, co_tenant: 1.0 };
    assert_caps_hold(Pattern::Async, CoTenant::None, &bounds);
}

#[test]
fn caps_hold_for_batches_in_streams_alone() {
    let bounds = Bounds { long: 0.04, short: 0.1, co_tenant: 1.0 };
    assert_caps_hold(Pattern::Batch { launches: 16 }, CoTenant::None, &bounds);
}

#[test]
fn caps_hold_for_busy_streams_beside_unlimited_co_tenant() {
    let bounds = Bounds { long: 0.04, short: 0.062, co_tenant: 0.96 };
    assert_caps_hold(Pattern::Async, CoTenant::Unlimited, &bounds);
}

#[test]
fn caps_hold_for_batches_in_streams_beside_co_tenant() {
    let bounds = Bounds { long: 0.07, short: 0.08, co_tenant: 0.95 };
    assert_caps_hold(Pattern::Batch { launches: 16 }, CoTenant::Unlimited, &bounds);
}

/// Returns the part of the GPU of a program under a cap of 30 %, from 2 to 12 s.
fn part_at_30_percent(
    spec: GpuSpec,
    cpu: CpuSpec,
    program: &Program,
    beside: Option<&Program>,
) -> f64 {
    let other = beside.map(|other| Container::new(other.clone(), NONE, 0));
    let mut world =
        world(spec, [Container::new(program.clone(), FIXED, 30)].into_iter().chain(other));
    world.set_assumed_slice(2 * MS);
    world.set_cpu(cpu);
    world.run(12 * S);
    world.record().part(0, 2 * S, 12 * S)
}

/// Containers cannot read the length of time slices.
#[test]
fn caps_of_streams_hold_for_slices_of_another_length() {
    for slice in [MS, 6 * MS, 30 * MS] {
        let spec = GpuSpec { slice, ..GpuSpec::default() };
        for kernel in [20 * US, 200 * US, 2 * MS] {
            for (streams, fill) in [(2, 60), (8, 12)] {
                let program = Program::new(kernel, Pattern::Async).streams(streams).fill(fill);
                let other = Program::new(MS, Pattern::Async);
                let part = part_at_30_percent(spec, CpuSpec::default(), &program, Some(&other));
                assert!((0.26..=0.35).contains(&part), "{slice}, {kernel}, {streams}: {part}");
            }
        }
    }
}

/// Threads lose their CPU at any point.
#[test]
fn caps_of_streams_hold_for_preempted_threads() {
    let cpu = CpuSpec { preempts_one_of: 1_000, ..CpuSpec::default() };
    for kernel in [20 * US, 200 * US] {
        for pattern in [Pattern::Async, Pattern::Batch { launches: 16 }] {
            let program = Program::new(kernel, pattern).streams(4).fill(25);
            let part = part_at_30_percent(GpuSpec::default(), cpu, &program, None);
            assert!((0.27..=0.32).contains(&part), "{pattern:?}, {kernel}: {part}");
        }
    }
}

/// Its turns are shorter than a time slice, so that windows do not show them.
#[test]
fn streams_beside_short_turns_get_their_cap() {
    for gap in [0, 100 * US, MS] {
        let other = Program::new(100 * US, Pattern::Sync { gap });
        for (streams, fill) in [(2, 60), (8, 12)] {
            let program = Program::new(50 * US, Pattern::Async).streams(streams).fill(fill);
            let part =
                part_at_30_percent(GpuSpec::default(), CpuSpec::default(), &program, Some(&other));
            assert!((0.20..=0.32).contains(&part), "{gap}, {streams}: {part}");
        }
    }
}

/// One of a hundred kernels takes 100 times as long. The host corrects what windows do not show.
#[test]
fn long_kernels_among_streams_are_charged() {
    let program = Program::new(50 * US, Pattern::Async).streams(4).fill(25).tail(100, 5 * MS);
    let mut world = World::new(GpuSpec::default(), Host::default(), 3);
    world.add(Container::new(program, FIXED, 30));
    world.run(40 * S);
    let (first, later) =
        (world.record().part(0, S, 11 * S), world.record().part(0, 20 * S, 40 * S));
    assert!((0.25..=0.37).contains(&first), "{first}");
    assert!((0.27..=0.33).contains(&later), "{later}");
}

/// Share of the GPU under a cap of 30 % after 30 s, with the corrections by the host.
fn corrected_part(containers: impl IntoIterator<Item = Container>) -> f64 {
    let mut world = World::new(GpuSpec::default(), Host::default(), 3);
    for container in containers {
        world.add(container);
    }
    world.run(50 * S);
    world.record().part(0, 30 * S, 50 * S)
}

/// Inference servers launch short kernels in several streams; more of them than channels delay each
/// other's events.
#[test]
fn short_kernels_in_many_streams_get_their_cap() {
    for (streams, fill) in [(8, 12), (8, 60), (8, 100), (20, 12)] {
        for kernel in [20 * US, 200 * US] {
            let program = Program::new(kernel, Pattern::Async).streams(streams).fill(fill);
            let part = corrected_part([Container::new(program, FIXED, 30)]);
            let what = format!("{streams} streams, {fill} %, {} us", kernel / US);
            assert!((0.28..=0.32).contains(&part), "{what}: {part}");
        }
    }
}

/// Each stream's launches wait for tokens while those of the others are under way.
#[test]
fn streams_beside_an_unlimited_co_tenant_get_their_cap() {
    for (kernel, processes) in [(2 * US, 3), (50 * US, 1), (2 * MS, 1)] {
        let program = Program::new(kernel, Pattern::Async).streams(4).fill(25);
        let part = corrected_part([
            Container { processes, ..Container::new(program, FIXED, 30) },
            Container::new(Program::new(MS, Pattern::Async), NONE, 0),
        ]);
        assert!((0.27..=0.32).contains(&part), "{} us, {processes}: {part}", kernel / US);
    }
}

#[test]
fn streams_below_their_cap_keep_their_speed() {
    for (kernel, fill, pattern) in [
        (20 * US, 12, Pattern::Sparse { every: 20 * US }),
        (20 * US, 60, Pattern::Batch { launches: 16 }),
        (200 * US, 12, Pattern::Batch { launches: 16 }),
        (200 * US, 25, Pattern::Sparse { every: 100 * US }),
        (2 * MS, 25, Pattern::Sparse { every: 2 * MS }),
    ] {
        let program = || Program::new(kernel, pattern).streams(4).fill(fill);
        let mut free = world(GpuSpec::default(), [Container::new(program(), Limiter::None, 0)]);
        free.run(6 * S);
        let needed = free.record().part(0, S, 6 * S);
        let cap = (needed * 100.0 / 0.9).ceil().min(99.0) as u32;
        let mut capped = world(GpuSpec::default(), [Container::new(program(), FIXED, cap)]);
        capped.run(6 * S);
        let got = capped.record().part(0, S, 6 * S);
        assert!(got > needed * 0.97, "{pattern:?}, {} us: {got} of {needed}", kernel / US);
    }
}

#[test]
fn overlapping_streams_are_charged_busy_time() {
    let program = Program::new(5 * MS, Pattern::Async).streams(2);
    let mut world = world(GpuSpec::default(), [Container::new(program, FIXED, 50)]);
    world.run(7 * S);
    let part = world.record().part(0, S, 7 * S);
    assert!((0.40..=0.52).contains(&part), "{part}");
}

#[test]
fn overlapping_long_and_short_kernels_are_charged_busy_time() {
    let pattern = Pattern::Beside { long: 50 * MS, launches: 2_000 };
    let program = Program::new(20 * US, pattern).streams(2).fill(90);
    let mut world = world(GpuSpec::default(), [Container::new(program, FIXED, 50)]);
    world.run(11 * S);
    let part = world.record().part(0, S, 11 * S);
    assert!((0.45..=0.52).contains(&part), "{part}");
}

/// Compute and communication overlap: NCCL's kernels take as long as their peers.
#[test]
fn long_kernels_do_not_delay_launches_in_other_streams() {
    let program = || {
        let pattern = Pattern::Beside { long: 50 * MS, launches: 2_000 };
        Program::new(20 * US, pattern).streams(2).fill(90)
    };
    let launches = |limiter| {
        let mut world =
            world(GpuSpec::default(), [Container::new(program(), limiter, 90), Container::idle()]);
        world.run(10 * S);
        world.launches(0) as f64
    };
    let (free, balanced) = (launches(Limiter::None), launches(BALANCE));
    assert!(balanced > free / 1.02, "{balanced} of {free}");
}

/// A process with two ranks of a collective: a held launch lets the kernel of its peer spin.
#[test]
fn collectives_within_a_process_make_progress() {
    let rounds = |limiter, percent| {
        let program = Program::new(100 * US, Pattern::Rendezvous).streams(2).fill(10);
        let mut world = world(
            GpuSpec::default(),
            [Container::new(program, limiter, percent), Container::idle()],
        );
        world.run(20 * S);
        let before = world.launches(0);
        world.run(40 * S);
        let launches = (world.launches(0) - before) as f64;
        (launches, world.record().part(0, 20 * S, 40 * S))
    };
    let (free, needed) = rounds(Limiter::None, 0);
    let (enough, _) = rounds(FIXED, (needed * 100.0 / 0.9).ceil() as u32);
    assert!(enough > free * 0.97, "{enough} of {free}");
    let (launches, part) = rounds(FIXED, 30);
    assert!((0.28..=0.32).contains(&part), "{part}");
    assert!(launches > 0.2 * free, "the time of a spinning kernel: {launches} of {free}");
}
