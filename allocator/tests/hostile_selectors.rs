//! Selectors are written by tenants and evaluated by the planning task: none may crash or block it.

use std::sync::mpsc;
use std::time::Duration;

use tessera_allocator::model::Device;
use tessera_allocator::selector::{CompiledSelector, DeviceView, SelectorError};
use tessera_api::names::{DeviceName, DriverName};

/// Much more than the slowest case takes in a debug build on two busy cores, which is 4 s. Without
/// the limits it would take minutes or hours.
const TIMEOUT: Duration = Duration::from_secs(300);

/// Evaluates the expression on a thread with the stack size of a tokio worker.
fn evaluate(expression: String) -> Result<bool, SelectorError> {
    let (sender, receiver) = mpsc::channel();
    let excerpt: String = expression.chars().take(80).collect();
    let evaluating = std::thread::Builder::new().stack_size(2 << 20).spawn(move || {
        let device = Device::new(DeviceName::new("gpu-0").expect("a name"));
        let view = DeviceView::new(&DriverName::new("gpu.example.com").expect("a name"), &device);
        let _ = sender.send(CompiledSelector::cached(&expression).and_then(|c| c.matches(&view)));
    });
    evaluating.expect("a thread");
    receiver.recv_timeout(TIMEOUT).unwrap_or_else(|error| panic!("{excerpt}: {error}"))
}

#[test]
fn excessive_format_precision_is_an_error() {
    let evaluate = evaluate("'%.70000f'.format([double(device.driver.size())]) != ''".to_owned());
    assert!(evaluate.is_err(), "{evaluate:?}");
}

#[test]
fn checks_long_expression_with_many_overloads() {
    assert_eq!(evaluate(format!("[{}].size() > 0", vec!["1<1"; 2500].join(","))), Ok(true));
}

#[test]
fn chain_of_doubling_macros_is_a_compile_error() {
    let chain = |calls: usize| format!("optional.of(1){}.hasValue()", ".optMap(x,x)".repeat(calls));
    assert_eq!(evaluate(chain(8)), Ok(true));
    assert!(matches!(evaluate(chain(60)), Err(SelectorError::Compile { .. })));
}

#[test]
fn work_beyond_cel_cost_is_limited() {
    let doubled: String = (0..60).map(|i| format!("cel.bind(v{},[v{i},v{i}],", i + 1)).collect();
    let text = "a".repeat(2000);
    for expression in [
        format!("cel.bind(v0,0,{doubled}v60 == v60{}", ")".repeat(61)),
        format!("cel.bind(v0,dyn(0),{doubled}v60.flatten(100).size() > 0{}", ")".repeat(61)),
        "lists.range(100000).distinct().size() > 0".to_owned(),
        "sets.contains(lists.range(100000), lists.range(100000))".to_owned(),
        "lists.range(100000).map(i, i).size() > 0".to_owned(),
        "lists.range(1000).all(i, lists.range(100000).exists(j, true))".to_owned(),
        "lists.range(100000).all(i, !'x'.matches('b' + string(i)))".to_owned(),
        format!("cel.bind(s, '{text}', cel.bind(t, s + s + s + s + s, t.replace('a', t) != ''))"),
        format!("cel.bind(s, '{text}', lists.range(50000).map(i, s).join() != '')"),
    ] {
        let excerpt: String = expression.chars().take(80).collect();
        let result = evaluate(expression);
        assert!(matches!(result, Err(SelectorError::TooExpensive(_))), "{excerpt}: {result:?}");
    }
}
