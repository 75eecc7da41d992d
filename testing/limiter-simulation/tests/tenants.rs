//! Several containers on one GPU.

use tessera_intercept_abi::ComputePolicy;
use tessera_intercept_simulation::{
    Container, CpuSpec, GpuSpec, Host, Limiter, MS, Pattern, Program, S, US, World,
};

const FIXED: Limiter = Limiter::Tessera(ComputePolicy::Fixed);
const BALANCE: Limiter = Limiter::Tessera(ComputePolicy::Balance);
const NONE: Limiter = Limiter::Tessera(ComputePolicy::None);
const NO_HOST: Host = Host { every: None, delay: 0, measures: false };

fn world(containers: impl IntoIterator<Item = Container>) -> World {
    let mut world = World::new(GpuSpec::default(), Host::default(), 3);
    for container in containers {
        world.add(container);
    }
    world
}

#[test]
fn equal_caps_get_equal_time_within_5_percent() {
    for (first, second) in
        [(50 * US, 50 * US), (50 * US, 5 * MS), (5 * MS, 50 * MS), (300 * US, 700 * US)]
    {
        let program = |kernel| Program::new(kernel, Pattern::Async);
        let mut world = world([
            Container::new(program(first), FIXED, 50),
            Container::new(program(second), FIXED, 50),
        ]);
        world.run(11 * S);
        let ratio = world.record().part(0, S, 11 * S) / world.record().part(1, S, 11 * S);
        assert!((0.95..=1.05).contains(&ratio), "{first} beside {second}: {ratio}");
    }
}

#[test]
fn caps_of_30_and_70_percent_hold_within_10_percent() {
    for (first, second) in
        [(50 * US, 50 * US), (50 * US, 5 * MS), (5 * MS, 50 * US), (50 * MS, 5 * MS)]
    {
        let program = |kernel| Program::new(kernel, Pattern::Async);
        let mut world = world([
            Container::new(program(first), FIXED, 30),
            Container::new(program(second), FIXED, 70),
        ]);
        world.run(11 * S);
        let ratio = world.record().part(1, S, 11 * S) / world.record().part(0, S, 11 * S);
        assert!((2.1..=2.566).contains(&ratio), "{first} beside {second}: {ratio}");
    }
}

#[test]
fn balance_uses_idle_time_and_yields_within_200_ms() {
    for kernel in [50 * US, MS, 5 * MS] {
        let return_time = 3 * S;
        let returning =
            Program::new(MS, Pattern::Batch { launches: 16 }).active(vec![(return_time, 6 * S)]);
        let mut world = world([
            Container::new(Program::new(kernel, Pattern::Async), BALANCE, 30),
            Container::new(returning, NONE, 0),
        ]);
        world.run(8 * S);
        let part = |from, to| world.record().part(0, from, to);
        assert!(part(S, 3 * S) > 0.97, "alone, it uses the whole GPU: {}", part(S, 3 * S));
        let back = part(return_time + 200 * MS, return_time + 700 * MS);
        assert!((0.25..=0.35).contains(&back), "kernel {kernel}: {back}");
        let after = part(6 * S + 200 * MS, 8 * S);
        assert!(after > 0.97, "alone again: {after}");
    }
}

#[test]
fn balance_yields_to_co_tenant_within_its_share() {
    // Its share is 50 %, of which it uses 20 %.
    let small = Program::new(2 * MS, Pattern::Sync { gap: 8 * MS });
    let mut alone = world([Container::new(small.clone(), FIXED, 50)]);
    alone.run(6 * S);
    let mut both = world([
        Container::new(small, FIXED, 50),
        Container::new(Program::new(200 * US, Pattern::Async), BALANCE, 50),
    ]);
    both.run(6 * S);
    let retained = both.record().part(0, S, 6 * S) / alone.record().part(0, S, 6 * S);
    assert!(retained > 0.75, "each of its kernels may wait for one slice: {retained}");
    let all = both.record().part(0, S, 6 * S) + both.record().part(1, S, 6 * S);
    assert!(all > 0.95, "no idle time: {all}");
}

#[test]
fn spare_time_goes_to_higher_priority() {
    let busy = || Container::new(Program::new(500 * US, Pattern::Async), BALANCE, 25);
    let mut first = busy();
    first.priority = 0;
    let mut second = busy();
    second.priority = 1;
    let mut world = world([second, first]);
    world.run(6 * S);
    let (low, high) = (world.record().part(0, S, 6 * S), world.record().part(1, S, 6 * S));
    assert!((0.22..=0.28).contains(&low), "guaranteed share: {low}");
    assert!(high > 0.68, "spare time: {high}");
}

#[test]
fn limit_above_the_guarantee_is_not_exceeded() {
    let busy = |limit_percent| Container {
        limit_percent,
        ..Container::new(Program::new(500 * US, Pattern::Async), BALANCE, 20)
    };
    let mut alone = world([busy(50)]);
    alone.run(6 * S);
    let part = alone.record().part(0, S, 6 * S);
    assert!((0.48..=0.52).contains(&part), "alone: {part}");
    let mut both = world([busy(30), busy(100)]);
    both.run(6 * S);
    let part = |of| both.record().part(of, S, 6 * S);
    assert!((0.28..=0.32).contains(&part(0)), "limited: {}", part(0));
    assert!(part(1) > 0.66, "gets what the limit of the other leaves: {}", part(1));
}

/// Guarantees of 200 % of the GPU.
#[test]
fn oversubscribed_guarantees_scale_down_in_proportion() {
    let busy =
        |limiter, percent| Container::new(Program::new(500 * US, Pattern::Async), limiter, percent);
    for (limiters, percents) in [
        ([FIXED, FIXED, FIXED], [100, 50, 50]),
        ([BALANCE, BALANCE, BALANCE], [100, 50, 50]),
        ([BALANCE, FIXED, BALANCE], [80, 80, 40]),
    ] {
        let containers = limiters.into_iter().zip(percents).map(|(l, p)| busy(l, p));
        let mut world = world(containers);
        world.run(11 * S);
        let whole: u32 = percents.iter().sum();
        for (at, percent) in percents.into_iter().enumerate() {
            let (part, expected) =
                (world.record().part(at, S, 11 * S), f64::from(percent) / f64::from(whole));
            let ratio = part / expected;
            assert!((0.9..=1.1).contains(&ratio), "{percents:?}: {at} has {part}");
        }
    }
}

/// One of two containers that are guaranteed the whole GPU has no work for three seconds.
#[test]
fn idle_oversubscribed_guarantee_costs_the_other_nothing() {
    let until = Program::new(500 * US, Pattern::Async).active(vec![(0, 4 * S), (7 * S, 11 * S)]);
    for limiter in [FIXED, BALANCE] {
        let busy = Container::new(Program::new(500 * US, Pattern::Async), limiter, 100);
        let mut world = world([busy, Container::new(until.clone(), limiter, 100)]);
        world.run(11 * S);
        let part = |from, to| world.record().part(0, from, to);
        for (from, to) in [(S, 4 * S), (8 * S, 11 * S)] {
            assert!((0.47..=0.53).contains(&part(from, to)), "both: {}", part(from, to));
        }
        let alone = part(4 * S + 300 * MS, 7 * S);
        assert!(alone > 0.96, "alone: {alone}");
    }
}

/// Without cores nothing is guaranteed.
#[test]
fn container_without_guarantee_waits_while_others_have_work() {
    let busy = |from, to| Program::new(500 * US, Pattern::Async).active(vec![(from, to)]);
    let low = Container { priority: 2, ..Container::new(busy(0, 12 * S), BALANCE, 0) };
    let high = Container { priority: 0, ..Container::new(busy(4 * S, 8 * S), BALANCE, 50) };
    let mut world = world([low, high]);
    world.run(12 * S);
    let part = |of, from, to| world.record().part(of, from, to);
    assert!(part(0, S, 4 * S) > 0.97, "alone: {}", part(0, S, 4 * S));
    assert!(part(1, 5 * S, 8 * S) > 0.95, "high priority: {}", part(1, 5 * S, 8 * S));
    assert!(part(0, 5 * S, 8 * S) < 0.03, "it waits: {}", part(0, 5 * S, 8 * S));
    assert!(part(0, 9 * S, 12 * S) > 0.97, "alone again: {}", part(0, 9 * S, 12 * S));
}

#[test]
fn cap_is_never_exceeded_without_host() {
    for kernel in [50 * US, 500 * US, 5 * MS, 50 * MS] {
        let mut world = World::new(GpuSpec::default(), NO_HOST, 3);
        world.add(Container::new(Program::new(kernel, Pattern::Async), FIXED, 30));
        world.add(Container::new(Program::new(MS, Pattern::Async), NONE, 0));
        world.run(7 * S);
        let part = world.record().part(0, S, 7 * S);
        assert!((0.10..=0.31).contains(&part), "kernel {kernel}: {part}");
    }
}

#[test]
fn balance_is_fixed_without_host() {
    let mut world = World::new(GpuSpec::default(), NO_HOST, 3);
    world.add(Container::new(Program::new(500 * US, Pattern::Async), BALANCE, 40));
    world.run(6 * S);
    let part = world.record().part(0, S, 6 * S);
    assert!((0.39..=0.41).contains(&part), "{part}");
}

#[test]
fn known_slice_length_does_not_affect_caps() {
    for slice in [MS, 3 * MS, 6 * MS] {
        for kernel in [50 * US, 500 * US, 50 * MS] {
            let mut world = World::new(GpuSpec { slice, ..GpuSpec::default() }, Host::default(), 3);
            world.add(Container::new(Program::new(kernel, Pattern::Async), FIXED, 30));
            world.add(Container::new(Program::new(MS, Pattern::Async), NONE, 0));
            world.run(9 * S);
            let part = world.record().part(0, 2 * S, 9 * S);
            assert!((0.28..=0.32).contains(&part), "slice {slice}, kernel {kernel}: {part}");
        }
    }
}

#[test]
fn killed_processes_are_reclaimed() {
    let program = Program::new(5 * MS, Pattern::Async);
    let mut world = world([Container { processes: 8, ..Container::new(program, FIXED, 40) }]);
    for slot in 0..7 {
        world.run(S + slot as u64 * 100 * MS);
        world.kill(0, slot);
    }
    world.run(8 * S);
    let part = world.record().part(0, 2 * S, 8 * S);
    assert!((0.38..=0.42).contains(&part), "the last process has the whole share: {part}");
}

#[test]
fn long_kernels_are_charged_without_co_tenants() {
    const SEEDS: u64 = 8;
    let program = Program::new(50 * US, Pattern::Async).tail(100, 10 * MS);
    let part = |seed| {
        let mut world = World::new(GpuSpec::default(), Host::default(), seed);
        world.add(Container::new(program.clone(), FIXED, 30));
        world.run(25 * S);
        world.record().part(0, 5 * S, 25 * S)
    };
    let mean = (1..=SEEDS).map(part).sum::<f64>() / SEEDS as f64;
    assert!((0.28..=0.32).contains(&mean), "its mean length is three times its usual one: {mean}");
}

/// Half of the launches of a kernel take fifty times as long as the others.
#[test]
fn kernels_of_two_lengths_get_their_cap() {
    for pattern in [Pattern::Async, Pattern::Sync { gap: 0 }] {
        for percent in [30, 80] {
            let mut world = World::new(GpuSpec::default(), NO_HOST, 3);
            let program = Program::new(100 * US, pattern).tail(2, 5 * MS);
            world.add(Container::new(program, FIXED, percent));
            world.run(60 * S);
            let part = world.record().part(0, 30 * S, 60 * S);
            let cap = f64::from(percent) / 100.0;
            assert!((cap - 0.02..=cap + 0.02).contains(&part), "{pattern:?}, {percent} %: {part}");
        }
    }
}

/// The program sees the end of its launches when it launches again.
#[test]
fn caps_hold_for_programs_that_pause() {
    const CAP: f64 = 0.25;
    let begins: Vec<_> = (0..6).map(|pulse| S + pulse * 3_170 * MS).collect();
    let active: Vec<_> = begins.iter().map(|begin| (*begin, begin + 1_300 * MS)).collect();
    for (kernel, pattern) in [(MS, Pattern::Async), (5 * MS, Pattern::Batch { launches: 16 })] {
        for (processes, has_neighbour, measures) in
            [(1, true, true), (3, false, true), (3, true, true), (3, false, false)]
        {
            let host = Host { measures, ..Host::default() };
            let mut world = World::new(GpuSpec::default(), host, 5);
            let program = Program::new(kernel, pattern).active(active.clone());
            world.add(Container { processes, ..Container::new(program, FIXED, 25) });
            if has_neighbour {
                world.add(Container::new(Program::new(MS, Pattern::Async), NONE, 0));
            }
            world.run(20 * S);
            for begin in &begins[1..] {
                let part = world.record().part(0, *begin, begin + S);
                let what = format!("{kernel} ns, {processes}, {has_neighbour}, {measures}");
                assert!((CAP - 0.05..=CAP + 0.05).contains(&part), "{what}: {part} at {begin}");
            }
        }
    }
}

/// The program sees the end of its launches long after, when it synchronizes.
#[test]
fn programs_that_work_before_a_sync_get_their_cap() {
    for kernel in [2_300 * US, 5 * MS] {
        let program = Program::new(kernel, Pattern::Batch { launches: 16 }).before_sync(400 * MS);
        let mut world = world([Container { processes: 3, ..Container::new(program, FIXED, 10) }]);
        world.run(15 * S);
        let part = world.record().part(0, 5 * S, 15 * S);
        assert!((0.08..=0.12).contains(&part), "{kernel} ns: {part}");
    }
}

#[test]
fn sparse_launches_are_not_throttled() {
    let sparse = || Program::new(200 * US, Pattern::Sparse { every: 10 * MS });
    let mut free = world([Container::new(sparse(), Limiter::None, 0)]);
    let mut capped = world([Container::new(sparse(), FIXED, 5)]);
    free.run(6 * S);
    capped.run(6 * S);
    assert!(capped.launches(0) as f64 > free.launches(0) as f64 * 0.98);
}

/// Threads lose their CPU at any point, also between a launch and its events.
#[test]
fn preempted_launches_do_not_delay_later_ones() {
    let cpu = CpuSpec { preempts_one_of: 200, ..CpuSpec::default() };
    for kernel in [3 * US, 50 * US, 700 * US, 5 * MS] {
        for pattern in [Pattern::Sync { gap: 0 }, Pattern::Async, Pattern::Batch { launches: 8 }] {
            for percent in [10, 50, 90] {
                let mut world =
                    world([Container::new(Program::new(kernel, pattern), FIXED, percent)]);
                world.set_cpu(cpu);
                world.run(5 * S);
                let longest = world.longest_unneeded_wait(0);
                let what = format!("{pattern:?}, {} us, {percent} %", kernel / US);
                assert!(longest <= 20 * MS, "{what}: {} ms", longest / MS);
            }
        }
    }
}

/// Their own CPU limit is tighter than their cap.
#[test]
fn programs_with_a_cpu_limit_get_the_gpu_time_they_need() {
    let program = || Program::new(3 * US, Pattern::Sparse { every: 15 * US });
    let limited = |limiter, percent| Container {
        cpu_percent: Some(50),
        ..Container::new(program(), limiter, percent)
    };
    let mut free = world([limited(Limiter::None, 0)]);
    free.run(11 * S);
    let needed = free.record().part(0, S, 11 * S);
    let mut capped = world([limited(FIXED, (needed * 100.0 / 0.9).ceil() as u32)]);
    capped.run(11 * S);
    let got = capped.record().part(0, S, 11 * S);
    assert!(got > needed * 0.97, "{got} of {needed}");
}

#[test]
fn programs_below_their_cap_keep_their_speed() {
    for (kernel, overlap, pattern) in [
        (2 * US, 0, Pattern::Sync { gap: 0 }),
        (2 * US, 0, Pattern::Async),
        (3 * US, 0, Pattern::Sparse { every: 15 * US }),
        (20 * US, 0, Pattern::Sync { gap: 5 * US }),
        (300 * US, 0, Pattern::Sync { gap: 200 * US }),
        (5 * MS, 0, Pattern::Sync { gap: 5 * MS }),
        (20 * US, 6 * US, Pattern::Batch { launches: 100 }),
    ] {
        let program = || Program::new(kernel, pattern).overlap(overlap);
        let mut free = world([Container::new(program(), Limiter::None, 0)]);
        free.run(6 * S);
        let needed = free.record().part(0, S, 6 * S);
        let mut capped =
            world([Container::new(program(), FIXED, (needed * 100.0 / 0.9).ceil() as u32)]);
        capped.run(6 * S);
        let got = capped.record().part(0, S, 6 * S);
        assert!(got > needed * 0.97, "{pattern:?}, {} us: {got} of {needed}", kernel / US);
    }
}

/// A language model has that many shapes.
#[test]
fn thousands_of_shapes_keep_their_speed() {
    let launches = |limiter| {
        let program = Program::new(20 * US, Pattern::Async).shapes(3_000);
        let mut world = world([Container::new(program, limiter, 90), Container::idle()]);
        world.run(3 * S);
        world.launches(0) as f64
    };
    let (free, balanced) = (launches(Limiter::None), launches(BALANCE));
    assert!(balanced > free / 1.05, "{balanced} of {free}");
}

/// Share of the GPU that a program gets under a cap of 30 % after it has run for 30 s.
fn part_at_30_percent(program: &Program, processes: usize, measures: bool) -> f64 {
    let host = Host { measures, ..Host::default() };
    let mut world = World::new(GpuSpec::default(), host, 3);
    world.add(Container { processes, ..Container::new(program.clone(), FIXED, 30) });
    world.run(50 * S);
    world.record().part(0, 30 * S, 50 * S)
}

/// An event between two kernels of programmatic dependent launch separates them: such a sample is
/// longer than the kernel without events.
#[test]
fn dependent_launches_get_their_cap() {
    for kernel in [10 * US, 100 * US] {
        for percent in [30, 70] {
            let program = Program::new(kernel, Pattern::Async).overlap(kernel / 3);
            let mut world = world([Container::new(program, FIXED, percent)]);
            world.run(50 * S);
            let part = world.record().part(0, 30 * S, 50 * S);
            let cap = f64::from(percent) / 100.0;
            assert!((cap - 0.02..=cap + 0.02).contains(&part), "{} us: {part}", kernel / US);
        }
    }
}

/// No events can be recorded in a ninth context of a process: the CPU measures launches there.
#[test]
fn launches_without_events_get_their_cap() {
    for kernel in [20 * US, 200 * US, 2 * MS, 40 * MS] {
        let program = Program::new(kernel, Pattern::Async).without_events();
        let us = kernel / US;
        let alone = part_at_30_percent(&program, 1, false);
        assert!((0.1..=0.31).contains(&alone), "{us} us, not measured by the host: {alone}");
        let alone = part_at_30_percent(&program, 1, true);
        assert!((0.28..=0.32).contains(&alone), "{us} us: {alone}");
        let mut world = world([
            Container::new(program, FIXED, 30),
            Container::new(Program::new(MS, Pattern::Async), NONE, 0),
        ]);
        world.run(50 * S);
        let part = world.record().part(0, 30 * S, 50 * S);
        assert!((0.25..=0.32).contains(&part), "{us} us beside another: {part}");
    }
}

/// Data-parallel training on shares of two GPUs: a rank spins while its peer waits for tokens.
#[test]
fn ranks_on_two_shares_make_progress() {
    let rounds = |compute, limiter, percent| {
        let host = Host { every: None, ..Host::default() };
        let mut world = World::new(GpuSpec::default(), host, 3);
        let rank = Program::new(500 * US, Pattern::Rank { compute });
        for gpu in 0..2 {
            world.add(Container { gpu, ..Container::new(rank.clone(), limiter, percent) });
        }
        world.run(30 * S);
        let before = world.launches(0);
        world.run(60 * S);
        let part = |of| world.record().part(of, 30 * S, 60 * S);
        ((world.launches(0) - before) as f64, [part(0), part(1)])
    };
    for (compute, percents) in [(20, &[10, 20, 30, 50, 80][..]), (400, &[20, 30, 50])] {
        let (free, _) = rounds(compute, Limiter::None, 0);
        for percent in percents {
            let (launches, parts) = rounds(compute, FIXED, *percent);
            let cap = f64::from(*percent) / 100.0;
            let holds = parts.iter().all(|part| (cap - 0.02..=cap + 0.02).contains(part));
            assert!(holds, "{percent} %: {parts:?}");
            assert!(launches > 0.8 * cap * free, "{percent} %: {} of all", launches / free);
        }
    }
}

/// Containers cannot read the length of time slices, which an administrator can change.
#[test]
fn caps_hold_for_slices_of_another_length() {
    for slice in [MS, 6 * MS, 30 * MS] {
        for kernel in [50 * US, 500 * US, 50 * MS] {
            let mut world = World::new(GpuSpec { slice, ..GpuSpec::default() }, Host::default(), 3);
            world.set_assumed_slice(2 * MS);
            world.add(Container::new(Program::new(kernel, Pattern::Async), FIXED, 30));
            world.add(Container::new(Program::new(MS, Pattern::Async), NONE, 0));
            world.run(40 * S);
            let part = world.record().part(0, 20 * S, 40 * S);
            assert!((0.27..=0.33).contains(&part), "slice {slice}, kernel {kernel}: {part}");
        }
    }
}

/// Copies, and kernels that other kernels launch.
#[test]
fn work_that_is_not_launched_counts_against_the_cap() {
    for (kernel, pattern) in [
        (20 * US, Pattern::Async),
        (2 * MS, Pattern::Async),
        (200 * US, Pattern::Sync { gap: 100 * US }),
    ] {
        for processes in [1, 4] {
            let program = Program::new(kernel, pattern).unseen(kernel);
            let without = part_at_30_percent(&program, processes, false);
            assert!(without > 0.4, "not charged: {without}");
            let part = part_at_30_percent(&program, processes, true);
            // NVML reports whole percents of each process.
            let most = 0.31 + 0.005 * processes as f64;
            assert!((0.28..=most).contains(&part), "{pattern:?}, {processes}: {part}");
        }
    }
}
