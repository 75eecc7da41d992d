//! Several containers on one GPU, and what happens to them.

use tessera_intercept_abi::ComputePolicy;
use tessera_intercept_simulation::{
    Container, GpuSpec, Host, Limiter, MS, Pattern, Program, S, US, World,
};

const FIXED: Limiter = Limiter::Tessera(ComputePolicy::Fixed);
const BALANCE: Limiter = Limiter::Tessera(ComputePolicy::Balance);
const NONE: Limiter = Limiter::Tessera(ComputePolicy::None);

fn container(program: Program, limiter: Limiter, percent: u32) -> Container {
    Container { program, processes: 1, limiter, percent, priority: 0 }
}

fn world(containers: impl IntoIterator<Item = Container>) -> World {
    let mut world = World::new(GpuSpec::default(), Host::default(), 3);
    for container in containers {
        world.add(container);
    }
    world
}

#[test]
fn two_equal_tenants_get_the_same_within_5_percent() {
    for (one, other) in
        [(50 * US, 50 * US), (50 * US, 5 * MS), (5 * MS, 50 * MS), (300 * US, 700 * US)]
    {
        let program = |kernel| Program::new(kernel, Pattern::Async);
        let mut world =
            world([container(program(one), FIXED, 50), container(program(other), FIXED, 50)]);
        world.run(11 * S);
        let ratio = world.record().part(0, S, 11 * S) / world.record().part(1, S, 11 * S);
        assert!((0.95..=1.05).contains(&ratio), "{one} beside {other}: {ratio}");
    }
}

#[test]
fn tenants_of_30_and_70_percent_get_30_to_70_within_10_percent() {
    for (one, other) in
        [(50 * US, 50 * US), (50 * US, 5 * MS), (5 * MS, 50 * US), (50 * MS, 5 * MS)]
    {
        let program = |kernel| Program::new(kernel, Pattern::Async);
        let mut world =
            world([container(program(one), FIXED, 30), container(program(other), FIXED, 70)]);
        world.run(11 * S);
        let ratio = world.record().part(1, S, 11 * S) / world.record().part(0, S, 11 * S);
        assert!((2.1..=2.566).contains(&ratio), "{one} beside {other}: {ratio}");
    }
}

#[test]
fn balance_uses_what_others_leave_and_is_back_at_its_share_within_200_ms() {
    for kernel in [50 * US, MS, 5 * MS] {
        let returns = 3 * S;
        let comes_back =
            Program::new(MS, Pattern::Batch { launches: 16 }).active(vec![(returns, 6 * S)]);
        let mut world = world([
            container(Program::new(kernel, Pattern::Async), BALANCE, 30),
            container(comes_back, NONE, 0),
        ]);
        world.run(8 * S);
        let part = |from, to| world.record().part(0, from, to);
        assert!(part(S, 3 * S) > 0.97, "alone it has everything: {}", part(S, 3 * S));
        let back = part(returns + 200 * MS, returns + 700 * MS);
        assert!((0.25..=0.35).contains(&back), "kernel {kernel}: {back}");
        let after = part(6 * S + 200 * MS, 8 * S);
        assert!(after > 0.97, "alone again: {after}");
    }
}

#[test]
fn balance_leaves_a_tenant_with_a_share_what_it_uses() {
    // 50 % is its share; it wants a fifth of the GPU.
    let small = Program::new(2 * MS, Pattern::Sync { gap: 8 * MS });
    let mut alone = world([container(small.clone(), FIXED, 50)]);
    alone.run(6 * S);
    let mut both = world([
        container(small, FIXED, 50),
        container(Program::new(200 * US, Pattern::Async), BALANCE, 50),
    ]);
    both.run(6 * S);
    let kept = both.record().part(0, S, 6 * S) / alone.record().part(0, S, 6 * S);
    assert!(kept > 0.75, "each of its kernels may wait for one slice: {kept}");
    let all = both.record().part(0, S, 6 * S) + both.record().part(1, S, 6 * S);
    assert!(all > 0.95, "nothing is left idle: {all}");
}

#[test]
fn what_is_left_goes_to_the_higher_priority() {
    let busy = || container(Program::new(500 * US, Pattern::Async), BALANCE, 25);
    let mut first = busy();
    first.priority = 0;
    let mut second = busy();
    second.priority = 1;
    let mut world = world([second, first]);
    world.run(6 * S);
    let (low, high) = (world.record().part(0, S, 6 * S), world.record().part(1, S, 6 * S));
    assert!((0.22..=0.28).contains(&low), "it keeps its share: {low}");
    assert!(high > 0.68, "and the other has the rest: {high}");
}

#[test]
fn without_the_host_a_cap_is_never_exceeded() {
    for kernel in [50 * US, 500 * US, 5 * MS, 50 * MS] {
        let mut world = World::new(GpuSpec::default(), Host { every: None, delay: 0 }, 3);
        world.add(container(Program::new(kernel, Pattern::Async), FIXED, 30));
        world.add(container(Program::new(MS, Pattern::Async), NONE, 0));
        world.run(7 * S);
        let part = world.record().part(0, S, 7 * S);
        assert!((0.10..=0.31).contains(&part), "kernel {kernel}: {part}");
    }
}

#[test]
fn without_the_host_balance_is_fixed() {
    let mut world = World::new(GpuSpec::default(), Host { every: None, delay: 0 }, 3);
    world.add(container(Program::new(500 * US, Pattern::Async), BALANCE, 40));
    world.run(6 * S);
    let part = world.record().part(0, S, 6 * S);
    assert!((0.39..=0.41).contains(&part), "{part}");
}

#[test]
fn slices_of_other_lengths_make_no_difference_where_they_are_known() {
    for slice in [MS, 3 * MS, 6 * MS] {
        for kernel in [50 * US, 500 * US, 50 * MS] {
            let mut world = World::new(GpuSpec { slice, ..GpuSpec::default() }, Host::default(), 3);
            world.add(container(Program::new(kernel, Pattern::Async), FIXED, 30));
            world.add(container(Program::new(MS, Pattern::Async), NONE, 0));
            world.run(9 * S);
            let part = world.record().part(0, 2 * S, 9 * S);
            assert!((0.28..=0.32).contains(&part), "slice {slice}, kernel {kernel}: {part}");
        }
    }
}

#[test]
fn processes_that_are_killed_leave_nothing_behind() {
    let program = Program::new(5 * MS, Pattern::Async);
    let mut world = world([Container { processes: 8, ..container(program, FIXED, 40) }]);
    for slot in 0..7 {
        world.run(S + slot as u64 * 100 * MS);
        world.kill(0, slot);
    }
    world.run(8 * S);
    let part = world.record().part(0, 2 * S, 8 * S);
    assert!((0.38..=0.42).contains(&part), "the last has all of the container's: {part}");
}

#[test]
fn a_kernel_that_now_and_then_takes_long_is_charged_for_it_where_nobody_else_is() {
    let program = Program::new(50 * US, Pattern::Async).tail(100, 10 * MS);
    let mut world = world([container(program, FIXED, 30)]);
    world.run(21 * S);
    let part = world.record().part(0, S, 21 * S);
    assert!((0.25..=0.38).contains(&part), "its mean is thrice its usual length: {part}");
}

#[test]
fn a_program_that_never_waits_and_launches_little_is_not_held_back() {
    let sparse = || Program::new(200 * US, Pattern::Sparse { every: 10 * MS });
    let mut free = world([container(sparse(), Limiter::Nothing, 0)]);
    let mut capped = world([container(sparse(), FIXED, 5)]);
    free.run(6 * S);
    capped.run(6 * S);
    assert!(capped.launches(0) as f64 > free.launches(0) as f64 * 0.98);
}

#[test]
fn overlapping_streams_cost_what_the_gpu_was_busy_at_least() {
    let program = Program::new(5 * MS, Pattern::Async).streams(2);
    let mut world = world([container(program, FIXED, 50)]);
    world.run(7 * S);
    let part = world.record().part(0, S, 7 * S);
    assert!((0.40..=0.52).contains(&part), "{part}");
}
