//! The page of the dialects.

use tessera_dialect::{DialectDescription, Trigger, descriptions};

use crate::Page;
use crate::table::{code, header, table};

pub(crate) fn dialects() -> Page {
    let mut text = header("Dialects", "dialect/src/dialects/");
    text.push_str(
        "Names by which pods ask other systems for GPUs, and what `kubectl tessera convert` does with\n\
         them, by the default settings. [Convert manifests](../user/convert.md) explains the\n\
         settings.\n",
    );
    for dialect in descriptions() {
        text.push_str(&format!("\n## `{}`\n\n", dialect.dialect));
        text.push_str(&table(&["", ""], &rows(&dialect)));
    }
    Page { path: "docs/reference/dialects.md", text }
}

fn rows(dialect: &DialectDescription) -> Vec<Vec<String>> {
    let (mut resources, mut asking) = (Vec::new(), Vec::new());
    for trigger in &dialect.triggers {
        match trigger {
            Trigger::Resource(name) => resources.push(name.as_str()),
            Trigger::Annotation(name) => asking.push(name.as_str()),
        }
    }
    let texts = |names: &'_ [String]| -> Vec<String> { names.to_vec() };
    let owned = |names: &[&str]| -> Vec<String> { names.iter().map(|n| (*n).to_owned()).collect() };
    let rows = [
        ("resources", owned(&resources)),
        ("annotations that ask for GPUs", owned(&asking)),
        ("annotations that are read", texts(&dialect.annotations)),
        ("annotations of the old scheduler, removed", texts(&dialect.written)),
        ("schedulers whose pods are read", owned(&dialect.schedulers)),
        ("schedulers that are replaced", owned(&dialect.replaced_schedulers)),
        ("labels that opt out", texts(&dialect.opt_out)),
        ("variable that is refused", dialect.unlimited.map(str::to_owned).into_iter().collect()),
        ("`computePolicy`", vec![dialect.compute_policy.to_string()]),
    ];
    let row = |(title, names): (&str, Vec<String>)| {
        let names: Vec<_> = names.iter().map(|name| code(name)).collect();
        (!names.is_empty()).then(|| vec![title.to_owned(), names.join(", ")])
    };
    rows.into_iter().filter_map(row).collect()
}
