//! Compares the documentation with the repository: examples, links, paths, commands, flags, values.
//! `docs/contributing/documentation.md` lists the checks.

#![allow(clippy::unwrap_used, reason = "a test; what is missing is a failure")]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim, ResourceClaimTemplate};
use k8s_openapi::api::scheduling::v1::PriorityClass;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tessera_api::config::GpuConfig;
use tessera_api::defaults::GpuDefaults;
use tessera_api::names::DRIVER_NAME;
use tessera_api::quota::GpuQuota;
use tessera_api::resize::GpuResize;

/// Longest README, in lines.
const README_LINES: usize = 130;
/// Longest decision record, in words after its status line.
const RECORD_WORDS: usize = 300;
/// Flags in backquotes that belong to programs of others.
const FOREIGN_FLAGS: [&str; 9] = [
    "check",       // intercept/symbols/generate.py
    "data",        // cargo's, after `--`
    "features",    // cargo
    "list",        // libtest
    "locked",      // cargo
    "release",     // cargo
    "root-dir",    // kubelet
    "set",         // helm
    "show-output", // libtest
];
/// Commands whose flags are Tessera's.
const PROGRAMS: [&str; 4] =
    ["kubectl tessera ", "tessera-", "target/debug/tessera-", "kubectl-tessera "];

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

/// Returns the paths of files below `directory` with one of these endings, relative to the
/// repository. Skips build output and hidden directories except `.github`.
fn files(directory: &str, endings: &[&str]) -> Vec<String> {
    fn walk(root: &Path, directory: &Path, endings: &[&str], found: &mut Vec<String>) {
        for entry in fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_str().unwrap();
            let skipped = name == "target" || (name.starts_with('.') && name != ".github");
            if path.is_dir() && !skipped {
                walk(root, &path, endings, found);
            } else if endings.iter().any(|ending| name.ends_with(ending)) {
                found.push(path.strip_prefix(root).unwrap().to_str().unwrap().to_owned());
            }
        }
    }
    let mut found = Vec::new();
    walk(&repository(), &repository().join(directory), endings, &mut found);
    found.sort();
    assert!(!found.is_empty(), "no files in {directory}");
    found
}

fn read(path: &str) -> String {
    fs::read_to_string(repository().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// Returns the pages that this repository publishes as documentation.
fn pages() -> Vec<String> {
    let mut pages: Vec<String> =
        ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "examples/README.md"]
            .map(str::to_owned)
            .into();
    pages.extend(files("docs", &[".md"]));
    assert!(pages.len() > 40, "too few pages: {pages:?}");
    pages
}

/// A line of a page.
struct Line<'t> {
    number: usize,
    text: &'t str,
    /// Language of the code block that it is in, such as `yaml`; empty without one.
    code: Option<&'t str>,
}

/// Returns the lines of a page, without the fences of code blocks.
fn lines(text: &str) -> Vec<Line<'_>> {
    let mut code = None;
    let mut found = Vec::new();
    for (index, text) in text.lines().enumerate() {
        if let Some(language) = text.trim_start().strip_prefix("```") {
            code = if code.is_none() { Some(language.trim()) } else { None };
        } else {
            found.push(Line { number: index + 1, text, code });
        }
    }
    assert!(code.is_none(), "a code block does not end");
    found
}

/// Returns the code spans of a line of prose.
fn spans(line: &str) -> Vec<&str> {
    line.split('`').skip(1).step_by(2).collect()
}

/// Returns the code in a line: its spans in prose, all of it in a block.
fn code_of<'t>(line: &Line<'t>) -> Vec<&'t str> {
    if line.code.is_some() { vec![line.text] } else { spans(line.text) }
}

/// A name in a line of a page, and true if the repository has it.
type Mention = (String, bool);

/// Checks that everything that `mentions` finds in the pages exists. Fails if it finds no more than
/// `least`, because it then misses most.
fn check_mentions(
    kind: &str,
    least: usize,
    pages: &[String],
    mentions: impl Fn(&str, &Line<'_>) -> Vec<Mention>,
) {
    let (mut missing, mut count) = (Vec::new(), 0);
    for page in pages {
        let text = read(page);
        for line in lines(&text) {
            for (name, exists) in mentions(page, &line) {
                count += 1;
                if !exists {
                    missing.push(format!("{page}:{}: no {kind} {name}", line.number));
                }
            }
        }
    }
    assert!(count > least, "only {count} mentions of a {kind}");
    assert!(missing.is_empty(), "\n{}", missing.join("\n"));
}

/// Returns the code spans of a line of prose; none for a line of a code block.
fn prose_spans<'t>(line: &Line<'t>) -> Vec<&'t str> {
    if line.code.is_some() { Vec::new() } else { spans(line.text) }
}

/// Returns the documents of a YAML text.
fn documents(text: &str) -> Vec<Value> {
    serde_saphyr::from_multiple(text).unwrap_or_else(|error| panic!("{error}\n{text}"))
}

/// Decodes an object strictly: a field that `T` does not have is lost, and found missing.
fn strictly<T: DeserializeOwned + Serialize>(object: &Value) -> Result<(), String> {
    let decoded: T = serde_json::from_value(object.clone()).map_err(|error| error.to_string())?;
    let encoded = serde_json::to_value(decoded).map_err(|error| error.to_string())?;
    if &encoded == object { Ok(()) } else { Err(format!("unknown fields: {object} is {encoded}")) }
}

/// Checks an object of an example and returns the number of GpuConfigs in it.
fn check_object(object: &Value) -> Result<usize, String> {
    let configs = match object["kind"].as_str().unwrap_or_default() {
        "Pod" => strictly::<Pod>(object).map(|()| None)?,
        "Job" => strictly::<Job>(object).map(|()| None)?,
        "PriorityClass" => strictly::<PriorityClass>(object).map(|()| None)?,
        "DeviceClass" => {
            strictly::<DeviceClass>(object).map(|()| object.pointer("/spec/config"))?
        }
        "ResourceClaim" => {
            strictly::<ResourceClaim>(object).map(|()| object.pointer("/spec/devices/config"))?
        }
        "ResourceClaimTemplate" => strictly::<ResourceClaimTemplate>(object)
            .map(|()| object.pointer("/spec/spec/devices/config"))?,
        "GpuDefaults" => {
            let defaults: GpuDefaults =
                serde_json::from_value(object.clone()).map_err(|error| error.to_string())?;
            defaults.config().map_err(|error| error.to_string())?;
            strictly::<GpuDefaults>(object)?;
            return Ok(1);
        }
        "GpuQuota" => {
            let quota: GpuQuota =
                serde_json::from_value(object.clone()).map_err(|error| error.to_string())?;
            quota.limits().map_err(|error| error.to_string())?;
            strictly::<GpuQuota>(object).map(|()| None)?
        }
        "GpuResize" => {
            let resize: GpuResize =
                serde_json::from_value(object.clone()).map_err(|error| error.to_string())?;
            resize.sizes().map_err(|error| error.to_string())?;
            strictly::<GpuResize>(object).map(|()| None)?
        }
        "GpuConfig" => {
            return GpuConfig::decode(object).map(|_| 1).map_err(|error| error.to_string());
        }
        kind => return Err(format!("unknown kind `{kind}`")),
    };
    let configs = configs.and_then(Value::as_array).into_iter().flatten();
    let own = configs.map(|config| &config["opaque"]).filter(|own| own["driver"] == DRIVER_NAME);
    own.map(|own| {
        let config = GpuConfig::decode(&own["parameters"]).map_err(|error| error.to_string())?;
        config.effective().map(|_| ()).map_err(|error| error.to_string())
    })
    .collect::<Result<Vec<()>, String>>()
    .map(|all| all.len())
}

#[test]
fn examples_are_valid_objects() {
    let (mut configs, mut kinds) = (0, BTreeSet::new());
    for file in files("examples", &[".yaml", ".yml"]) {
        for object in documents(&read(&file)) {
            configs += check_object(&object).unwrap_or_else(|error| panic!("{file}: {error}"));
            kinds.insert(object["kind"].as_str().unwrap().to_owned());
        }
    }
    assert!(configs >= 5, "only {configs} GpuConfigs in the examples");
    assert!(kinds.len() >= 3, "only {kinds:?} in the examples");
}

#[test]
fn yaml_blocks_are_valid_objects() {
    let mut blocks = 0;
    for page in pages() {
        let text = read(&page);
        let mut block = String::new();
        for line in lines(&text).iter().chain([&Line { number: 0, text: "", code: None }]) {
            if line.code == Some("yaml") {
                block = format!("{block}{}\n", line.text);
            } else if !block.is_empty() {
                for object in documents(&std::mem::take(&mut block)) {
                    check_object(&object).unwrap_or_else(|error| panic!("{page}: {error}"));
                    blocks += 1;
                }
            }
        }
    }
    assert!(blocks >= 10, "only {blocks} objects in the pages");
}

/// Returns the text of `PATH` or, for `PATH#2`, of its second YAML document.
fn included(specification: &str) -> String {
    let (path, document) = specification.split_once('#').unwrap_or((specification, ""));
    let text = read(path);
    let text = text.trim_end();
    match document.parse::<usize>() {
        Ok(number) => text.split("\n---\n").nth(number - 1).unwrap().trim_end().to_owned(),
        Err(_) => text.to_owned(),
    }
}

/// Returns the page with the block after each `<!-- include: PATH -->` replaced by the file.
fn with_includes(page: &str, used: &mut BTreeSet<String>) -> String {
    let mut result = String::new();
    let mut rest = page.lines().peekable();
    while let Some(line) = rest.next() {
        result = format!("{result}{line}\n");
        let inner = line.strip_prefix("<!-- include: ").and_then(|l| l.strip_suffix(" -->"));
        let Some(specification) = inner else { continue };
        used.insert(specification.split('#').next().unwrap().to_owned());
        let language = if specification.contains(".yaml") { "yaml" } else { "" };
        result = format!("{result}```{language}\n{}\n```\n", included(specification));
        if rest.next_if(|line| line.starts_with("```")).is_some() {
            for skipped in rest.by_ref() {
                if skipped.starts_with("```") {
                    break;
                }
            }
        }
    }
    result
}

#[test]
fn included_blocks_equal_their_files() {
    let update = std::env::var_os("UPDATE").is_some();
    let mut used = BTreeSet::new();
    for page in pages() {
        let text = read(&page);
        let wanted = with_includes(&text, &mut used);
        if update && text != wanted {
            fs::write(repository().join(&page), &wanted).unwrap();
        } else {
            assert_eq!(text, wanted, "{page} differs from what it includes; UPDATE=1 writes it");
        }
    }
    for example in files("examples", &[".yaml", ".yml"]) {
        assert!(used.contains(&example), "no page includes {example}");
    }
}

/// Returns the anchors of a page's headings, as GitHub creates them.
fn anchors(text: &str) -> BTreeSet<String> {
    let headings = lines(text).into_iter().filter(|line| line.code.is_none());
    let headings = headings.filter(|line| line.text.starts_with('#'));
    let slug = |heading: &str| {
        let kept = heading.trim_start_matches('#').trim().to_lowercase();
        let kept = kept.chars().filter(|c| c.is_alphanumeric() || " -_".contains(*c));
        kept.map(|c| if c == ' ' { '-' } else { c }).collect::<String>()
    };
    headings.map(|line| slug(line.text)).collect()
}

/// Returns the targets of a line's links.
fn targets(line: &str) -> Vec<&str> {
    let prose = line.split('`').step_by(2);
    let parts = prose.flat_map(|prose| prose.split("](").skip(1));
    let mut found: Vec<&str> = parts.filter_map(|part| part.split(')').next()).collect();
    // A link whose text is code, such as [`x`](y).
    found.extend(line.split("`](").skip(1).filter_map(|part| part.split(')').next()));
    found
}

#[test]
fn links_resolve() {
    check_mentions("link target", 100, &files(".", &[".md"]), |page, line| {
        if line.code.is_some() {
            return Vec::new();
        }
        let is_local = |target: &&str| {
            !target.contains("://") && !target.starts_with("mailto:") && !target.is_empty()
        };
        let mention = |target: &str| {
            let (path, anchor) = target.split_once('#').unwrap_or((target, ""));
            let directory = Path::new(page).parent().unwrap();
            let file = if path.is_empty() { page.into() } else { directory.join(path) };
            let file = repository().join(file);
            let has_anchor =
                || fs::read_to_string(&file).is_ok_and(|text| anchors(&text).contains(anchor));
            (target.to_owned(), file.exists() && (anchor.is_empty() || has_anchor()))
        };
        targets(line.text).into_iter().filter(is_local).map(mention).collect()
    });
}

#[test]
fn named_paths_exist() {
    let root: BTreeSet<String> = fs::read_dir(repository())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name != "target")
        .collect();
    check_mentions("path", 50, &pages(), |_, line| {
        let is_path = |span: &&str| {
            span.split_once('/').is_some_and(|(first, _)| root.contains(first))
                && !span.contains([' ', '*', '<', '{', '$', '('])
        };
        let paths = prose_spans(line).into_iter().filter(is_path);
        paths.map(|path| (path.to_owned(), repository().join(path).exists())).collect()
    });
}

#[test]
fn make_targets_exist() {
    let makefile = read("Makefile");
    let known: BTreeSet<&str> =
        makefile.lines().filter_map(|line| line.strip_prefix(".PHONY: ")).collect();
    check_mentions("make target", 20, &pages(), |_, line| {
        let target_of = |code: &str| {
            let mut words = code.split_whitespace().skip_while(|word| *word != "make").skip(1);
            let target = words.next()?;
            let is_target = target.starts_with(|c: char| c.is_ascii_lowercase());
            is_target.then(|| (target.to_owned(), known.contains(target)))
        };
        code_of(line).into_iter().filter_map(target_of).collect()
    });
}

/// Returns the long flags that the programs of this repository define with clap.
fn flags() -> BTreeSet<String> {
    let mut flags: BTreeSet<String> = ["help", "version"].map(str::to_owned).into();
    for file in files(".", &[".rs"]) {
        let text = read(&file);
        for attribute in text.split("#[arg(").skip(1) {
            let Some((inside, after)) = attribute.split_once(")]") else { continue };
            let mut parts = inside.split([',', '\n']).map(str::trim);
            let Some(long) = parts.find(|part| *part == "long" || part.starts_with("long ="))
            else {
                continue;
            };
            match long.split_once('"') {
                Some((_, name)) => flags.insert(name.trim_end_matches('"').to_owned()),
                None => {
                    let field = after
                        .lines()
                        .map(str::trim)
                        .find(|line| !line.is_empty() && !line.starts_with(['/', '#', ')', ']']));
                    let field = field.unwrap_or_default().trim_start_matches("pub ");
                    let name = field.trim_start_matches("pub(crate) ").split(':').next();
                    flags.insert(name.unwrap_or_default().trim().replace('_', "-"))
                }
            };
        }
    }
    assert!(flags.contains("memory-percent") && flags.contains("exclude-gpu"), "{flags:?}");
    flags
}

#[test]
fn named_flags_exist() {
    let known = flags();
    let name_of = |word: &str| {
        let name = word.strip_prefix("--").unwrap_or_default();
        name.split(['=', '|', ',', '`', ')']).next().unwrap_or_default().to_owned()
    };
    check_mentions("flag", 30, &pages(), |_, line| {
        let mut mentions = Vec::new();
        for code in code_of(line) {
            let command = code.trim_start();
            let command = command.strip_prefix("$ ").unwrap_or(command);
            let is_own = PROGRAMS.iter().any(|program| command.starts_with(program));
            let is_flag = line.code.is_none() && command.starts_with("--");
            let command = command.split(" # ").next().unwrap_or_default();
            let words = command.split_whitespace().take(if is_flag { 1 } else { usize::MAX });
            for word in words.filter(|word| word.starts_with("--")) {
                let name = name_of(word);
                let is_name = name.starts_with(|c: char| c.is_ascii_lowercase());
                if (is_own || is_flag) && is_name && !FOREIGN_FLAGS.contains(&name.as_str()) {
                    mentions.push((format!("--{name}"), known.contains(&name)));
                }
            }
        }
        mentions
    });
}

#[test]
fn named_metrics_exist() {
    let reference = read("docs/reference/metrics.md");
    // The changelog lists former names.
    let is_current =
        |page: &String| !page.starts_with("docs/reference/") && *page != "CHANGELOG.md";
    let pages: Vec<_> = pages().into_iter().filter(is_current).collect();
    check_mentions("metric", 15, &pages, |_, line| {
        let is_metric = |name: &&str| {
            let kind = name.strip_prefix("tessera_").and_then(|rest| rest.split('_').next());
            matches!(kind, Some("controller" | "driver" | "gpu" | "mps" | "share"))
                && !name.ends_with('*')
        };
        let names = prose_spans(line).into_iter().filter_map(|span| span.split(' ').next());
        let exists = |name: &str| reference.contains(&format!("`{name}`"));
        names.filter(is_metric).map(|name| (name.to_owned(), exists(name))).collect()
    });
}

#[test]
fn event_reasons_of_pending_pods_exist() {
    let (page, reference) = (read("docs/user/pending-pods.md"), read("docs/reference/events.md"));
    let rows = page.lines().filter_map(|line| line.strip_prefix("| `")?.split('`').next());
    let reasons: Vec<&str> = rows.collect();
    assert!(reasons.len() > 5, "{reasons:?}");
    for reason in reasons {
        assert!(reference.contains(&format!("| `{reason}` |")), "no event {reason}");
    }
}

#[test]
fn named_chart_values_exist() {
    let values: Value = serde_saphyr::from_str(&read("deploy/chart/tessera/values.yaml")).unwrap();
    let top: BTreeMap<String, Value> = serde_json::from_value(values.clone()).unwrap();
    check_mentions("chart value", 20, &pages(), |_, line| {
        let mut found: Vec<&str> = Vec::new();
        for code in code_of(line) {
            // `--set a.b=c,d.e=f`, also on a line of its own.
            let set = code.split("--set ").nth(1).unwrap_or_default();
            found.extend(set.split_whitespace().next().into_iter().flat_map(|s| s.split(',')));
            if line.code.is_none() && !code.contains([' ', '/', '(']) || code.contains(": ") {
                found.push(code);
            }
        }
        let is_value = |path: &&str| {
            let first = path.split('.').next().unwrap_or_default();
            // Not a value: a file of docs/design, or a field of a GpuConfig.
            let is_file = path.ends_with(".md") || path.ends_with(".rs");
            top.contains_key(first) && path.contains('.') && !path.contains([' ', '<']) && !is_file
        };
        let exists = |path: &str| values.pointer(&format!("/{}", path.replace('.', "/"))).is_some();
        let paths = found.iter().map(|value| value.split(['=', ':']).next().unwrap_or_default());
        paths.filter(is_value).map(|path| (path.to_owned(), exists(path))).collect()
    });
}

#[test]
fn named_trials_and_scenarios_exist() {
    let trials = read("e2e/src/trials.rs");
    check_mentions("trial or scenario", 5, &pages(), |_, line| {
        let words = code_of(line).into_iter().flat_map(|code| code.split([' ', '=']));
        let mention = |word: &str| {
            let (exists, name) = if let Some(name) = word.strip_prefix("trial/") {
                (trials.contains(&format!("\"{name}\"")), name)
            } else {
                let name = word.strip_prefix("scenario/")?;
                (repository().join(format!("e2e/scenarios/{name}.yaml")).exists(), name)
            };
            Some((word.to_owned(), exists || name == "..."))
        };
        words.filter_map(mention).collect()
    });
}

#[test]
fn decision_records_are_indexed_and_short() {
    let index = read("docs/adr/README.md");
    let records = files("docs/adr", &[".md"]);
    assert!(records.len() > 15, "{records:?}");
    for record in records.iter().filter(|record| !record.ends_with("README.md")) {
        let text = read(record);
        let mut head = text.lines();
        let title = head.next().unwrap_or_default().trim_start_matches("# ");
        let (number, title) = title.split_once(". ").unwrap();
        let status = head.nth(1).unwrap_or_default();
        let file = record.rsplit('/').next().unwrap();
        assert!(file.starts_with(&format!("{:0>4}-", number)), "{record}: number {number}");
        assert!(status.starts_with("Status: ") && status.contains(" · Date: 20"), "{record}");
        let date = &status.split("Date: ").nth(1).unwrap()[..10];
        let row = format!("| [{number}]({file}) | {title} | accepted | {date} |");
        assert!(index.contains(&row), "docs/adr/README.md has no row\n{row}");
        let words = head.flat_map(str::split_whitespace).count();
        assert!(words <= RECORD_WORDS, "{record}: {words} words, at most {RECORD_WORDS}");
    }
}

#[test]
fn readme_is_short_and_begins_with_the_status() {
    let text = read("README.md");
    let lines: Vec<&str> = text.lines().collect();
    assert!(lines.len() <= README_LINES, "{} lines, at most {README_LINES}", lines.len());
    assert!(lines[2].starts_with("**Status: "), "the third line has the status: {}", lines[2]);
}
