use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Stdio};

use tempfile::TempDir;

use super::*;

const GIB: u64 = 1 << 30;
/// Environment variable that makes this test program hold memory.
const HOLD: &str = "TESSERA_TEST_HOLD_BYTES_IN";

fn world() -> World {
    World::parse(crate::shipped::H100_8_NVSWITCH, "test").unwrap()
}

fn open(directory: &Path) -> Usage {
    Usage::open(&StateLocation::Shared(directory.to_owned()), &world()).unwrap()
}

/// Starts another process that holds a GiB of GPU 1, and waits until it does.
fn holder(directory: &Path) -> Child {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "usage::tests::holder_process", "--nocapture"])
        .env(HOLD, directory)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.as_mut().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap().contains("holding")));
    child
}

/// Not a test: the process that [`holder`] starts.
#[test]
fn holder_process() {
    let Some(directory) = std::env::var_os(HOLD) else { return };
    let usage = open(Path::new(&directory));
    usage.charge(1, GIB, 80 * GIB).unwrap();
    println!("holding");
    let _ = std::io::stdin().lines().next();
}

#[test]
fn charges_are_visible_to_all_and_refundable() {
    let directory = TempDir::new().unwrap();
    let (first, second) = (open(directory.path()), open(directory.path()));
    first.charge(0, 3 * GIB, 80 * GIB).unwrap();
    second.charge(0, GIB, 80 * GIB).unwrap();
    assert_eq!(
        (first.total(0), second.total(0), first.own(0), second.own(0)),
        (4 * GIB, 4 * GIB, 3 * GIB, GIB)
    );
    first.refund(0, 2 * GIB);
    first.refund(0, 5 * GIB);
    assert_eq!((first.own(0), second.total(0), second.total(1)), (0, GIB, 0));
}

#[test]
fn charge_beyond_capacity_fails_without_effect() {
    let directory = TempDir::new().unwrap();
    let (first, second) = (open(directory.path()), open(directory.path()));
    first.charge(0, 3 * GIB, 4 * GIB).unwrap();
    assert_eq!(second.charge(0, GIB + 1, 4 * GIB), Err(OutOfMemory { requested: GIB + 1 }));
    assert_eq!(second.charge(0, u64::MAX, 4 * GIB), Err(OutOfMemory { requested: u64::MAX }));
    second.charge(0, GIB, 4 * GIB).unwrap();
    assert_eq!(first.total(0), 4 * GIB);
}

#[test]
fn memory_of_killed_process_is_released() {
    let directory = TempDir::new().unwrap();
    let usage = open(directory.path());
    let mut child = holder(directory.path());
    assert_eq!(usage.total(1), GIB);
    let seen = usage.processes(1);
    assert_eq!((seen[0].pid, seen[0].bytes), (child.id(), GIB));
    assert!(!seen[0].name.is_empty());
    usage.charge(1, GIB, GIB).unwrap_err();
    child.kill().unwrap();
    child.wait().unwrap();
    usage.charge(1, GIB, GIB).unwrap();
    assert_eq!(usage.processes(1).len(), 1);
}

#[test]
fn freed_memory_belongs_to_the_first_process_that_has_it_open() {
    let directory = TempDir::new().unwrap();
    let [owner, first, second] = [(); 3].map(|()| open(directory.path()));
    owner.charge(0, GIB, 80 * GIB).unwrap();
    let memory = owner.export(512).unwrap();
    assert_eq!(owner.export(512), Some(memory), "once more");
    for other in [&first, &second] {
        assert!(other.opened(memory, 0, GIB));
    }
    assert_eq!((owner.total(0), owner.total(1)), (GIB, 0), "counted once");
    owner.freed(512);
    owner.refund(0, GIB);
    assert_eq!(owner.processes(0).len(), 1);
    assert_eq!((owner.total(0), owner.total(1)), (GIB, 0), "of the first");
    owner.charge(0, 79 * GIB + 1, 80 * GIB).unwrap_err();
    first.closed(memory);
    assert_eq!(owner.total(0), GIB, "of the second");
    drop(second);
    assert_eq!(owner.total(0), 0, "of none");
}

#[test]
fn memory_of_an_ended_process_lives_on_while_it_is_open() {
    let directory = TempDir::new().unwrap();
    let [owner, other] = [(); 2].map(|()| open(directory.path()));
    owner.charge(0, GIB, 80 * GIB).unwrap();
    let memory = owner.export(512).unwrap();
    assert!(other.opened(memory, 0, GIB));
    drop(owner);
    assert_eq!(other.total(0), GIB);
    // The slot gets another owner, which exports memory at the same address.
    let next = open(directory.path());
    let of_next = next.export(512).unwrap();
    assert!(of_next.slot == memory.slot && of_next != memory);
    assert_eq!(other.total(0), GIB);
    other.closed(memory);
    assert_eq!(other.total(0), 0);
}

#[test]
fn forked_child_does_not_hold_its_parents_memory() {
    let directory = TempDir::new().unwrap();
    let usage = open(directory.path());
    usage.charge(0, GIB, 80 * GIB).unwrap();
    // SAFETY: the child only touches the region, its own stack and the page allocator, and exits
    // by `_exit`.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let fresh =
            usage.own(0) == 0 && usage.charge(0, GIB, 80 * GIB).is_ok() && usage.own(0) == GIB;
        let both = fresh && usage.total(0) == 2 * GIB;
        // SAFETY: ends the child without running the parent's destructors.
        unsafe { libc::_exit(i32::from(!both)) };
    }
    let mut status = 0;
    // SAFETY: waits for the new child.
    unsafe { libc::waitpid(child, &mut status, 0) };
    assert_eq!(status, 0, "the child saw wrong numbers");
    assert_eq!(usage.total(0), GIB);
}

#[test]
fn concurrent_charges_never_exceed_capacity() {
    let directory = TempDir::new().unwrap();
    let granted: u64 = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..8)
            .map(|_| {
                scope.spawn(|| {
                    let usage = open(directory.path());
                    let count =
                        (0..1000).filter(|_| usage.charge(0, 1, 3000).is_ok()).count() as u64;
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
fn file_can_be_created_concurrently() {
    for _ in 0..50 {
        let directory = TempDir::new().unwrap();
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| open(directory.path()).charge(0, 1, GIB).unwrap());
            }
        });
        assert_eq!(
            fs::read_dir(directory.path()).unwrap().count(),
            1,
            "one file, no temporary files"
        );
    }
}

#[test]
fn worlds_in_one_directory_are_separate() {
    let directory = TempDir::new().unwrap();
    let usage = open(directory.path());
    usage.charge(0, GIB, GIB).unwrap();
    let second = World::parse(crate::shipped::T4_1, "test").unwrap();
    let second = Usage::open(&StateLocation::Shared(directory.path().to_owned()), &second).unwrap();
    assert_eq!(second.total(0), 0);
}

#[test]
fn foreign_file_is_rejected_and_unchanged() {
    for content in [b"short".to_vec(), vec![b'x'; 1 << 20]] {
        let directory = TempDir::new().unwrap();
        let path = directory.path().join(file_name(fingerprint(&world())));
        fs::write(&path, &content).unwrap();
        let error =
            Usage::open(&StateLocation::Shared(directory.path().to_owned()), &world()).unwrap_err();
        assert!(error.to_string().contains(path.to_str().unwrap()), "{error}");
        assert_eq!(fs::read(&path).unwrap(), content);
    }
}

#[test]
fn state_without_directory_is_private() {
    let usage = Usage::open(&StateLocation::Process, &world()).unwrap();
    usage.charge(0, GIB, GIB).unwrap();
    assert_eq!(usage.total(0), GIB);
    assert_eq!(Usage::open(&StateLocation::Process, &world()).unwrap().total(0), 0);
}
