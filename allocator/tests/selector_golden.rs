//! Selectors compared with upstream's allocator (dynamic-resource-allocation v0.37.1).
//!
//! Each line of `golden/selectors.tsv` is upstream's result for a request for one device with that
//! selector: `fit`, `none`, `celCompile` or `celRuntime`. `make goldens-check` runs upstream again
//! (`testing/oracle`, with the same device). No expression depends on the order of a map, which is
//! random upstream.

use tessera_allocator::model::{Attribute, Capacity, Device};
use tessera_allocator::selector::{CompiledSelector, DeviceView, SelectorError};
use tessera_api::Quantity;
use tessera_api::names::{DeviceName, DriverName};

fn device() -> DeviceView {
    let attributes = [
        ("index", Attribute::Int(3)),
        ("mig", Attribute::Bool(false)),
        ("model", Attribute::String("H100".into())),
        ("size", Attribute::String("80Gi".into())),
        ("version", Attribute::Version("580.95.5".into())),
        ("other.example.com/n", Attribute::Int(1)),
    ];
    let memory = Capacity { value: Quantity::parse("80Gi").expect("a quantity"), policy: None };
    let device = Device {
        attributes: attributes.map(|(name, value)| (name.to_owned(), value)).into_iter().collect(),
        capacity: std::sync::Arc::new([("memory".to_owned(), memory)].into_iter().collect()),
        ..Device::new(DeviceName::new("gpu-0").expect("a name"))
    };
    DeviceView::new(&DriverName::new("gpu.example.com").expect("a name"), &device)
}

fn answer(expression: &str, device: &DeviceView) -> Result<bool, SelectorError> {
    CompiledSelector::cached(expression)?.matches(device)
}

fn outcome(answer: &Result<bool, SelectorError>) -> &'static str {
    match answer {
        Ok(true) => "fit",
        Ok(false) => "none",
        Err(SelectorError::Compile { .. } | SelectorError::Unsupported { .. }) => "celCompile",
        Err(_) => "celRuntime",
    }
}

#[test]
fn selector_results_equal_upstream() {
    let device = device();
    let golden = include_str!("golden/selectors.tsv");
    assert_eq!(golden.lines().count(), 476, "selectors");
    let differences: Vec<String> = golden
        .lines()
        .filter_map(|line| {
            let (expected, expression) =
                line.split_once('\t').expect("an outcome and an expression");
            let answer = answer(expression, &device);
            let same = outcome(&answer) == expected;
            (!same).then(|| format!("{expression}\n  upstream: {expected}, we: {answer:?}"))
        })
        .collect();
    assert!(
        differences.is_empty(),
        "{} differences:\n{}",
        differences.len(),
        differences.join("\n")
    );
}
