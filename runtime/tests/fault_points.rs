//! Fault points as a crash test uses them. The kill is tried in a child process.

use std::os::unix::process::ExitStatusExt;
use std::process::Command;
use std::sync::mpsc;

use tessera_runtime::fault_points::{Fault, FaultPoints, UndeclaredPoint};

static POINTS: FaultPoints = FaultPoints::new(&["held", "killed", "unarmed"]);

/// Set in the child of [`armed_point_kills_the_process`].
const CHILD: &str = "TESSERA_FAULT_POINTS_TEST_CHILD";

#[test]
fn unarmed_point_only_counts() {
    POINTS.reach("unarmed");
    POINTS.reach("unarmed");
    assert_eq!((POINTS.all()["unarmed"].hits, POINTS.all()["unarmed"].armed), (2, None));
}

#[test]
fn held_thread_continues_when_point_is_disarmed() {
    POINTS.arm("held", Fault::Hold).expect("it is declared");
    let (sender, passed) = mpsc::channel();
    let holder = std::thread::spawn(move || {
        POINTS.reach("held");
        sender.send(()).expect("the test listens");
    });
    while POINTS.all()["held"].waiting == 0 {
        std::thread::yield_now();
    }
    assert_eq!(passed.try_recv(), Err(mpsc::TryRecvError::Empty));
    POINTS.disarm("held").expect("it is declared");
    passed.recv().expect("it continued");
    holder.join().expect("it ended");
    assert_eq!(POINTS.all()["held"].waiting, 0);
}

#[test]
fn armed_point_kills_the_process() {
    if std::env::var_os(CHILD).is_some() {
        POINTS.arm("killed", Fault::Kill).expect("it is declared");
        POINTS.reach("killed");
        return;
    }
    let child = Command::new(std::env::current_exe().expect("this program"))
        .args(["--exact", "armed_point_kills_the_process"])
        .env(CHILD, "1")
        .output()
        .expect("a child");
    assert_eq!(child.status.signal(), Some(9), "{child:?}");
}

#[test]
fn undeclared_point_cannot_be_armed() {
    assert_eq!(POINTS.arm("kild", Fault::Kill), Err(UndeclaredPoint("kild".to_owned())));
}

#[test]
#[should_panic(expected = "not declared")]
fn undeclared_point_cannot_be_reached() {
    POINTS.reach("forgotten");
}

#[test]
fn lists_points_with_names_of_faults() {
    static LISTED: FaultPoints = FaultPoints::new(&["one"]);
    LISTED.arm("one", Fault::Hold).expect("it is declared");
    let listed = serde_json::to_value(LISTED.all()).expect("JSON");
    assert_eq!(listed, serde_json::json!({"one": {"hits": 0, "armed": "hold", "waiting": 0}}));
}
