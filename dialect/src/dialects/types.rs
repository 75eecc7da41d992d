//! Lists of product names and UUIDs in annotations.

use crate::refusal::PodRefusal;
use crate::selector::{self, MAX_EXPRESSION, Text};

use super::Reader;
use super::reader::annotation_path;
use crate::pod::Pod;

/// Treatment of the items of a comma-separated list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Items {
    /// Items are trimmed, and empty ones ignored.
    Trimmed,
    /// Items count as they are; an empty one is a part of every text.
    Verbatim,
}

impl Items {
    fn of(self, list: &str) -> Vec<&str> {
        match self {
            Self::Verbatim => list.split(',').collect(),
            Self::Trimmed => {
                list.split(',').map(str::trim).filter(|item| !item.is_empty()).collect()
            }
        }
    }
}

/// Adds the selector of a list of parts, of which the text contains one, or none.
pub(super) fn select_parts(
    pod: &Pod<'_>,
    reader: &Reader<'_>,
    annotation: &str,
    (text, items): (Text, Items),
    wanted: bool,
) -> Result<Option<String>, PodRefusal> {
    let Some(list) = pod.annotation(annotation) else { return Ok(None) };
    let parts = items.of(list);
    let expression = match (parts.is_empty(), wanted) {
        (true, _) => return Ok(None),
        (false, true) => selector::contains_one(text, &parts),
        (false, false) => selector::contains_none(text, &parts),
    };
    checked(reader, annotation, list, expression).map(Some)
}

/// Returns the selector of the wanted parts; without a list of them, that of the unwanted ones,
/// which the old system does not look at otherwise.
pub(super) fn select_wanted_or_not(
    pod: &Pod<'_>,
    reader: &Reader<'_>,
    (wanted, unwanted): (&str, &str),
    parts: (Text, Items),
) -> Result<Option<String>, PodRefusal> {
    match select_parts(pod, reader, wanted, parts, true)? {
        None => select_parts(pod, reader, unwanted, parts, false),
        selector => Ok(selector),
    }
}

/// Adds the selector of a list of UUIDs, of which the GPU has one, or none.
pub(super) fn select_uuids(
    pod: &Pod<'_>,
    reader: &Reader<'_>,
    annotation: &str,
    wanted: bool,
) -> Result<Option<String>, PodRefusal> {
    let Some(list) = pod.annotation(annotation) else { return Ok(None) };
    let uuids = Items::Trimmed.of(list);
    let expression = match (uuids.is_empty(), wanted) {
        (true, _) => return Ok(None),
        (false, true) => selector::is_one_of(&uuids),
        (false, false) => selector::is_none_of(&uuids),
    };
    checked(reader, annotation, list, expression).map(Some)
}

fn checked(
    reader: &Reader<'_>,
    annotation: &str,
    list: &str,
    expression: String,
) -> Result<String, PodRefusal> {
    if expression.len() <= MAX_EXPRESSION {
        return Ok(expression);
    }
    let problem = format!(
        "becomes a selector of {} bytes; the API allows {MAX_EXPRESSION}",
        expression.len()
    );
    Err(reader.refusal(annotation_path(annotation), list, problem))
}
