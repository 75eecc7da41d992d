//! Makes tables of Rust of `symbols.txt` and `classes.txt`, and refuses a line that their heads do
//! not allow.

use std::fmt::Write as _;
use std::path::Path;
use std::{env, fs};

#[path = "src/hash.rs"]
mod hash;
use hash::hash;

fn main() {
    println!("cargo::rerun-if-changed=symbols.txt");
    println!("cargo::rerun-if-changed=classes.txt");
    println!("cargo::rerun-if-changed=src/hash.rs");
    let text = fs::read_to_string("symbols.txt").expect("symbols.txt is readable");
    let mut code = String::from("&[\n");
    let mut releases = Vec::new();
    let mut names = Vec::new();
    for (at, line) in text.lines().enumerate().filter(|(_, line)| !line.starts_with('#')) {
        let row =
            Row::parse(line).unwrap_or_else(|wrong| panic!("symbols.txt:{}: {wrong}", at + 1));
        releases.extend([row.first, row.last]);
        names.extend([row.symbol, row.base].map(|name| hash(name.as_bytes())));
        row.write(&mut code);
    }
    code.push_str("]\n");
    releases.sort_unstable();
    releases.dedup();
    let releases: String =
        releases.iter().map(|release| format!("SymbolVersion({release}), ")).collect();
    let out = env::var_os("OUT_DIR").expect("cargo sets OUT_DIR");
    fs::write(Path::new(&out).join("table.rs"), code).expect("OUT_DIR is writable");
    fs::write(Path::new(&out).join("releases.rs"), format!("&[{releases}]"))
        .expect("OUT_DIR is writable");
    names.sort_unstable();
    names.dedup();
    fs::write(Path::new(&out).join("names.rs"), format!("&{names:?}"))
        .expect("OUT_DIR is writable");
    let text = fs::read_to_string("classes.txt").expect("classes.txt is readable");
    fs::write(Path::new(&out).join("classes.rs"), classes(&text)).expect("OUT_DIR is writable");
}

/// The groups of `classes.txt`.
fn classes(text: &str) -> String {
    let mut code = String::from("&[\n");
    let mut group = None;
    let lines =
        text.lines().enumerate().filter(|(_, line)| !line.starts_with('#') && !line.is_empty());
    for (at, line) in lines {
        if let Some((class, why)) = line.strip_prefix('[').and_then(|line| line.split_once("] ")) {
            let class = match class {
                "memory" => "Memory",
                "launch" => "Launch",
                "reports" => "Reports",
                "resolves" => "Resolves",
                "context" => "Context",
                "waits" => "Waits",
                "passes" => "Passes",
                _ => panic!("classes.txt:{}: no class `{class}`", at + 1),
            };
            group = Some((class, why));
            continue;
        }
        let (class, why) = group
            .unwrap_or_else(|| panic!("classes.txt:{}: a name before the first group", at + 1));
        writeln!(
            code,
            "    Classified {{ base: \"{line}\", class: Class::{class}, why: \"{why}\" }},"
        )
        .expect("writing to a string cannot fail");
    }
    code + "]\n"
}

struct Row<'a> {
    symbol: &'a str,
    base: &'a str,
    version: u32,
    variant: &'static str,
    first: u32,
    last: u32,
    parameters: &'a str,
}

impl<'a> Row<'a> {
    fn parse(line: &'a str) -> Result<Self, String> {
        let fields: Vec<&str> = line.split(' ').collect();
        let [symbol, base, version, variant, first, last, parameters] = fields[..] else {
            return Err(format!("{} fields, not seven", fields.len()));
        };
        if !symbol.starts_with("cu") && !symbol.starts_with("nvml") {
            return Err(format!("`{symbol}` is of no library that is known"));
        }
        let version = version.parse().map_err(|_| format!("version `{version}` is no number"))?;
        let variant = match variant {
            "-" => "None",
            "ptds" => "Some(Variant::Ptds)",
            "ptsz" => "Some(Variant::Ptsz)",
            _ => return Err(format!("variant `{variant}` is none of ptds, ptsz, -")),
        };
        let parameters = if parameters == "-" { "" } else { parameters };
        if let Some(wrong) = parameters.chars().find(|letter| !"philfs".contains(*letter)) {
            return Err(format!("parameter `{wrong}` is none of p, h, i, l, f, s"));
        }
        Ok(Self {
            symbol,
            base,
            version,
            variant,
            first: number(first)?,
            last: number(last)?,
            parameters,
        })
    }

    fn write(&self, code: &mut String) {
        let Self { version, variant, first, last, parameters, .. } = self;
        let [symbol, base] = [self.symbol, self.base]
            .map(|name| format!("Name {{ text: \"{name}\", c: c\"{name}\" }}"));
        writeln!(
            code,
            "    Symbol {{ symbol: {symbol}, base: {base}, version: SymbolVersion({version}), variant: {variant}, \
             first: SymbolVersion({first}), last: SymbolVersion({last}), parameters: \"{parameters}\" }},"
        )
        .expect("writing to a string cannot fail");
    }
}

/// `12.9` as CUDA counts it.
fn number(release: &str) -> Result<u32, String> {
    let parts = release.split_once('.').map(|(major, minor)| (major.parse(), minor.parse()));
    match parts {
        Some((Ok::<u32, _>(major), Ok::<u32, _>(minor))) => Ok(major * 1000 + minor * 10),
        _ => Err(format!("release `{release}` is not as 12.9")),
    }
}
