use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Stdio};

use tempfile::TempDir;

use super::*;

const GIB: u64 = 1 << 30;
/// Tells this test program to be a process that holds memory.
const HOLD: &str = "TESSERA_TEST_HOLD_BYTES_IN";

fn world() -> World {
    World::parse(crate::shipped::H100_8_NVSWITCH, "test").unwrap()
}

fn open(directory: &Path) -> Usage {
    Usage::open(&StatePlace::Shared(directory.to_owned()), &world()).unwrap()
}

/// Starts another process that holds a GiB of GPU 1, and waits until it does.
fn holder(directory: &Path) -> Child {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "usage::tests::hold_memory_where_asked_to", "--nocapture"])
        .env(HOLD, directory)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.as_mut().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap().contains("holding")));
    child
}

/// Not a test of its own: what [`holder`] runs.
#[test]
fn hold_memory_where_asked_to() {
    let Some(directory) = std::env::var_os(HOLD) else { return };
    let usage = open(Path::new(&directory));
    usage.take(1, GIB, 80 * GIB).unwrap();
    println!("holding");
    let _ = std::io::stdin().lines().next();
}

#[test]
fn what_is_taken_is_seen_by_all_and_given_back() {
    let directory = TempDir::new().unwrap();
    let (one, other) = (open(directory.path()), open(directory.path()));
    one.take(0, 3 * GIB, 80 * GIB).unwrap();
    other.take(0, GIB, 80 * GIB).unwrap();
    assert_eq!(
        (one.total(0), other.total(0), one.own(0), other.own(0)),
        (4 * GIB, 4 * GIB, 3 * GIB, GIB)
    );
    one.give_back(0, 2 * GIB);
    one.give_back(0, 5 * GIB);
    assert_eq!((one.own(0), other.total(0), other.total(1)), (0, GIB, 0));
}

#[test]
fn more_than_the_capacity_is_refused_and_changes_nothing() {
    let directory = TempDir::new().unwrap();
    let (one, other) = (open(directory.path()), open(directory.path()));
    one.take(0, 3 * GIB, 4 * GIB).unwrap();
    assert_eq!(other.take(0, GIB + 1, 4 * GIB), Err(OutOfMemory { asked: GIB + 1 }));
    assert_eq!(other.take(0, u64::MAX, 4 * GIB), Err(OutOfMemory { asked: u64::MAX }));
    other.take(0, GIB, 4 * GIB).unwrap();
    assert_eq!(one.total(0), 4 * GIB);
}

#[test]
fn the_memory_of_a_killed_process_is_free_again() {
    let directory = TempDir::new().unwrap();
    let usage = open(directory.path());
    let mut child = holder(directory.path());
    assert_eq!(usage.total(1), GIB);
    let seen = usage.processes(1);
    assert_eq!((seen[0].pid, seen[0].bytes), (child.id(), GIB));
    assert!(!seen[0].name.is_empty());
    usage.take(1, GIB, GIB).unwrap_err();
    child.kill().unwrap();
    child.wait().unwrap();
    usage.take(1, GIB, GIB).unwrap();
    assert_eq!(usage.processes(1).len(), 1);
}

#[test]
fn a_forked_child_neither_holds_its_parents_memory_nor_prolongs_it() {
    let directory = TempDir::new().unwrap();
    let usage = open(directory.path());
    usage.take(0, GIB, 80 * GIB).unwrap();
    // SAFETY: the child only touches the region, its own stack and the page allocator, and leaves
    // by `_exit`.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let fresh =
            usage.own(0) == 0 && usage.take(0, GIB, 80 * GIB).is_ok() && usage.own(0) == GIB;
        let both = fresh && usage.total(0) == 2 * GIB;
        // SAFETY: ends the child without running the parent's destructors.
        unsafe { libc::_exit(i32::from(!both)) };
    }
    let mut status = 0;
    // SAFETY: waits for the child just made.
    unsafe { libc::waitpid(child, &mut status, 0) };
    assert_eq!(status, 0, "the child saw wrong numbers");
    assert_eq!(usage.total(0), GIB);
}

#[test]
fn racing_processes_never_hold_more_than_there_is() {
    let directory = TempDir::new().unwrap();
    let granted: u64 = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..8)
            .map(|_| {
                scope.spawn(|| {
                    let usage = open(directory.path());
                    let count = (0..1000).filter(|_| usage.take(0, 1, 3000).is_ok()).count() as u64;
                    assert!(
                        usage.total(0) <= 3000 + 8,
                        "more than eight in flight above the limit"
                    );
                    (usage, count)
                })
            })
            .collect();
        let done: Vec<_> = workers.into_iter().map(|worker| worker.join().unwrap()).collect();
        assert_eq!(done[0].0.total(0), done.iter().map(|(_, count)| count).sum::<u64>());
        done.iter().map(|(_, count)| count).sum()
    });
    assert!(granted <= 3000);
}

#[test]
fn many_may_make_the_file_at_the_same_time() {
    for _ in 0..50 {
        let directory = TempDir::new().unwrap();
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| open(directory.path()).take(0, 1, GIB).unwrap());
            }
        });
        assert_eq!(
            fs::read_dir(directory.path()).unwrap().count(),
            1,
            "one file, and nothing left over"
        );
    }
}

#[test]
fn worlds_in_one_directory_do_not_mix() {
    let directory = TempDir::new().unwrap();
    let usage = open(directory.path());
    usage.take(0, GIB, GIB).unwrap();
    let other = World::parse(crate::shipped::T4_1, "test").unwrap();
    let other = Usage::open(&StatePlace::Shared(directory.path().to_owned()), &other).unwrap();
    assert_eq!(other.total(0), 0);
}

#[test]
fn a_file_that_is_not_ours_is_refused_and_not_touched() {
    for content in [b"short".to_vec(), vec![b'x'; 1 << 20]] {
        let directory = TempDir::new().unwrap();
        let path = directory.path().join(file_name(fingerprint(&world())));
        fs::write(&path, &content).unwrap();
        let error =
            Usage::open(&StatePlace::Shared(directory.path().to_owned()), &world()).unwrap_err();
        assert!(error.to_string().contains(path.to_str().unwrap()), "{error}");
        assert_eq!(fs::read(&path).unwrap(), content);
    }
}

#[test]
fn state_without_a_directory_stays_in_the_process() {
    let usage = Usage::open(&StatePlace::Process, &world()).unwrap();
    usage.take(0, GIB, GIB).unwrap();
    assert_eq!(usage.total(0), GIB);
    assert_eq!(Usage::open(&StatePlace::Process, &world()).unwrap().total(0), 0);
}
