//! `ithaca.toml`: the models, clusters and workloads of a repository, as requests to the planner.
//!
//! The keys of a cluster and of a workload are options of `ithaca plan`; the command line reads them. All mistakes of a file
//! are reported together, each at its place.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use clap::error::ErrorKind;
use clap::{Arg, ArgAction, CommandFactory};
use ithaca_ir::diagnostic::nearest;
use ithaca_ir::{Diagnostic, Diagnostics, Span};
use ithaca_passes::registry::Registry;
use toml::Spanned;
use toml::de::{DeArray, DeTable, DeValue};

use crate::cli::{self, Cli, PlanArgs};
use crate::error::{Failure, Result, of_arguments};
use crate::files::{self, TextFile};
use crate::request::PlanRequest;
use crate::subject::{self, Model};

/// The plans of a repository.
#[derive(Clone, Debug)]
pub struct Project {
    /// The file, for further mistakes.
    pub file: TextFile,
    /// The folder of the committed plans.
    pub plans: PathBuf,
    /// A plan for each model on each cluster under each workload, in the order of the file.
    pub entries: Vec<Entry>,
}

/// A plan to make.
#[derive(Clone, Debug)]
pub struct Entry {
    /// The names of model, cluster and workload.
    pub names: [String; 3],
    /// The request.
    pub request: PlanRequest,
    /// The place of the workload in the file.
    pub place: Span,
}

impl Entry {
    /// The path of the plan in the folder of plans.
    pub fn path(&self) -> PathBuf {
        let [model, cluster, workload] = &self.names;
        Path::new(model).join(cluster).join(format!("{workload}.json"))
    }
}

/// The keys of the file.
const KEYS: [&str; 4] = ["plans", "models", "clusters", "workloads"];

/// The keys by which a workload names the only models and clusters that it is for.
const FILTERS: [&str; 2] = ["models", "clusters"];

/// The heading of the options that describe a cluster, in the help of `plan`.
const CLUSTER_HEADING: &str = "Cluster and mesh";

/// The headings of the options that describe a workload and its layout.
const WORKLOAD_HEADINGS: [&str; 5] = ["Workload", "Training", CLUSTER_HEADING, "Layout", "Search"];

/// Reads the file at `path`.
///
/// # Errors
/// `C01` for a file that cannot be read; `C30`, and the errors of models, clusters and requests, for the mistakes of the file.
pub fn read(registry: &Registry, path: &Path) -> Result<Project> {
    let file = TextFile::read_within(path, files::MAX_SMALL).map_err(|mut failure| {
        if !path.exists() {
            let written = |d: Diagnostic| d.help("`ithaca init` writes `ithaca.toml`");
            failure.diagnostics = failure.diagnostics.into_iter().map(written).collect();
        }
        failure
    })?;
    let folder = path.parent().map(Path::to_owned).unwrap_or_default();
    let text = file.text.clone();
    if text.trim_start().starts_with('{') {
        let path = path.display();
        let message = format!("`{path}` is JSON, and a project is TOML");
        let help = format!("`ithaca plan --check {path}` compares a plan with that of its request");
        return Err(Diagnostic::new("C30", message).help(help).into());
    }
    let (document, errors) = DeTable::parse_recoverable(&text);
    let mistakes = errors.iter().map(|e| {
        let span = e.span().map_or(Span::default(), |s| Span::new(s.start, s.end.max(s.start + 1)));
        let problem = e.message().lines().next().unwrap_or_default();
        Diagnostic::new("C30", format!("not TOML: {problem}")).at(span)
    });
    let mut reader = Reader { folder, mistakes: mistakes.collect() };
    let (plans, entries) = if reader.mistakes.is_empty() {
        reader.project(registry, document.get_ref())
    } else {
        Default::default()
    };
    if reader.mistakes.is_empty() {
        return Ok(Project { file, plans, entries });
    }
    reader.mistakes.sort_by_key(|mistake| mistake.span.unwrap_or_default().start);
    Err(file.refuse(reader.mistakes))
}

/// A named part of the file, in order of the places of the names.
type Named<'a, 'i> = Vec<(&'a str, Span, &'a Spanned<DeValue<'i>>)>;

/// The options of a cluster or a workload, as arguments of `plan`.
struct Options {
    name: String,
    place: Span,
    arguments: Vec<String>,
    /// The names that a workload is limited to, by key.
    only: BTreeMap<&'static str, Vec<String>>,
}

struct Reader {
    /// The folder that paths of the file begin at.
    folder: PathBuf,
    mistakes: Diagnostics,
}

impl Reader {
    fn refuse(&mut self, place: Span, message: String) -> &mut Diagnostic {
        self.mistakes.push(Diagnostic::new("C30", message).at(place));
        self.mistakes.last_mut().expect("a mistake was just added")
    }

    fn project(&mut self, registry: &Registry, document: &DeTable<'_>) -> (PathBuf, Vec<Entry>) {
        self.compare(document, "the file", KEYS.to_vec());
        let plans = match document.get("plans").map(|value| (span(value), value.get_ref())) {
            None => self.folder.join("plans"),
            Some((_, DeValue::String(folder))) => self.folder.join(folder.as_ref()),
            Some((place, _)) => {
                self.refuse(place, "`plans` is a folder, as in `plans = \"plans\"`".to_owned());
                PathBuf::new()
            }
        };
        let models: Vec<(String, Model)> =
            self.part(document, "models").into_iter().filter_map(|part| self.model(part)).collect();
        let clusters: Vec<Options> =
            self.part(document, "clusters").into_iter().filter_map(|part| self.cluster(part)).collect();
        // Those with mistakes are known by their names too.
        let names = FILTERS.map(|part| match document.get(part).map(Spanned::get_ref) {
            Some(DeValue::Table(table)) => {
                sorted(table).iter().map(|(name, ..)| (*name).to_owned()).collect()
            }
            _ => Vec::new(),
        });
        let workloads: Vec<Options> = self
            .part(document, "workloads")
            .into_iter()
            .filter_map(|part| self.options(part, &WORKLOAD_HEADINGS, &["cluster"], Some(&names)))
            .collect();
        if !self.mistakes.is_empty() {
            return Default::default();
        }
        let mut entries = Vec::new();
        for (name, model) in &models {
            for cluster in &clusters {
                for workload in workloads.iter().filter(|w| w.covers([name, &cluster.name])) {
                    entries.extend(self.entry(registry, (name, model), cluster, workload));
                }
            }
        }
        (plans, entries)
    }

    /// A table of named things, of which there is at least one.
    fn part<'a, 'i>(&mut self, document: &'a DeTable<'i>, key: &str) -> Named<'a, 'i> {
        let Some(value) = document.get(key) else {
            // The place of a missing table is the end of the file: nowhere.
            self.refuse(Span::default(), format!("the table `[{key}]` is missing"));
            return Vec::new();
        };
        let DeValue::Table(table) = value.get_ref() else {
            self.refuse(
                span(value),
                format!("`{key}` is a table: write `[{key}]`, and a line for each below"),
            );
            return Vec::new();
        };
        if table.is_empty() {
            let place = document.get_key_value(key).map(|(key, _)| span(key)).unwrap_or_default();
            self.refuse(place, format!("`[{key}]` is empty, and names at least one of the {key} to plan"));
        }
        let in_order = sorted(table);
        for (name, place, _) in &in_order {
            let is_name = !name.is_empty() && *name == name_of(name);
            if !is_name {
                let message = format!("`{name}` is not a name of letters, digits, `-`, `_` and `.`");
                self.refuse(*place, message);
            }
        }
        in_order
    }

    fn model(&mut self, (name, _, value): (&str, Span, &Spanned<DeValue<'_>>)) -> Option<(String, Model)> {
        let DeValue::String(path) = value.get_ref() else {
            let message =
                format!("`{name}` is a folder with config.json, as in `{name} = \"models/{name}\"`");
            self.refuse(span(value), message);
            return None;
        };
        match subject::described(&self.folder.join(path.as_ref())) {
            Ok(model) => Some((name.to_owned(), model)),
            Err(failure) => {
                self.found(failure, span(value), "");
                None
            }
        }
    }

    fn cluster(&mut self, part: (&str, Span, &Spanned<DeValue<'_>>)) -> Option<Options> {
        let mut options = self.options(part, &[CLUSTER_HEADING], &[], None)?;
        let given = options.arguments.iter().position(|a| a.starts_with("--cluster="));
        let named = given.map(|at| options.arguments.remove(at)["--cluster=".len()..].to_owned());
        let named = named.unwrap_or_else(|| options.name.clone());
        let beside = self.folder.join(&named);
        let path = if beside.is_file() { beside.display().to_string() } else { named };
        if let Err(failure) = subject::cluster(&path) {
            self.found(failure, options.place, "");
        }
        options.arguments.push(format!("--cluster={path}"));
        Some(options)
    }

    /// The options of a table whose keys are options under these headings, but for `not`. A workload may name models and
    /// clusters of those that are known.
    fn options(
        &mut self,
        (name, place, value): (&str, Span, &Spanned<DeValue<'_>>),
        headings: &[&str],
        not: &[&str],
        known: Option<&[Vec<String>; 2]>,
    ) -> Option<Options> {
        let DeValue::Table(table) = value.get_ref() else {
            let message =
                format!("`{name}` is a table of options of `ithaca plan`, as in `{{ seq = \"8k\" }}`");
            self.refuse(span(value), message);
            return None;
        };
        let cli = Cli::command();
        let plan = cli.find_subcommand("plan").expect("there is the command `plan`");
        let is_taken = |arg: &&Arg| arg.get_help_heading().is_some_and(|heading| headings.contains(&heading));
        let taken: BTreeMap<&str, &Arg> = plan
            .get_arguments()
            .filter(is_taken)
            .filter_map(|arg| Some((arg.get_long()?, arg)))
            .filter(|(long, _)| !not.contains(long))
            .collect();
        let filters = FILTERS.iter().filter(|_| known.is_some());
        self.compare(table, &format!("`{name}`"), taken.keys().chain(filters).copied().collect());
        let mut options =
            Options { name: name.to_owned(), place, arguments: Vec::new(), only: BTreeMap::new() };
        for (key, _, value) in sorted(table) {
            if let (Some(at), Some(known)) = (FILTERS.iter().position(|filter| *filter == key), known) {
                let names = self.filter(FILTERS[at], value, &known[at]);
                options.only.insert(FILTERS[at], names);
            } else if let Some(arg) = taken.get(key) {
                let arguments = self.arguments(key, arg, value);
                options.arguments.extend(arguments);
            }
        }
        Some(options)
    }

    /// The models or clusters that a workload is for.
    fn filter(&mut self, key: &str, value: &Spanned<DeValue<'_>>, known: &[String]) -> Vec<String> {
        let DeValue::Array(items) = value.get_ref() else {
            self.refuse(span(value), format!("`{key}` is a list of names of `[{key}]`"));
            return Vec::new();
        };
        let mut names = Vec::new();
        for item in items {
            let name = text(item.get_ref()).unwrap_or_default();
            if !known.contains(&name) {
                let known = known.iter().map(String::as_str);
                let refusal = Diagnostic::new("C30", format!("`[{key}]` has no `{name}`"));
                self.mistakes.push(refusal.names(key, &name, known).at(span(item)));
            }
            names.push(name);
        }
        names
    }

    /// The arguments of one option.
    fn arguments(&mut self, key: &str, arg: &Arg, value: &Spanned<DeValue<'_>>) -> Vec<String> {
        let one = |text: String| match (key, subject::documents_file(&text)) {
            ("documents", Some(file)) => format!("--{key}={}", self.folder.join(file).display()),
            _ => format!("--{key}={text}"),
        };
        let is_repeatable = matches!(arg.get_action(), ArgAction::Append);
        let (arguments, wanted) = match (arg.get_action(), value.get_ref()) {
            (ArgAction::SetTrue, DeValue::Boolean(is_set)) => {
                (Some(Vec::from_iter(is_set.then(|| format!("--{key}")))), "")
            }
            (ArgAction::SetTrue, _) => (None, "`true` or `false`"),
            (_, DeValue::Array(items)) if is_repeatable => {
                (texts(items).map(|items| items.into_iter().map(one).collect()), "a list of texts or numbers")
            }
            (_, value) => {
                let wanted =
                    if is_repeatable { "a text, a number, or a list of them" } else { "a text or a number" };
                (text(value).map(|text| vec![one(text)]), wanted)
            }
        };
        let Some(arguments) = arguments else {
            self.refuse(span(value), format!("`{key}` is {wanted}"));
            return Vec::new();
        };
        if let Err(error) = cli::arguments_of::<PlanArgs>("plan", "model", &arguments)
            && matches!(error.kind(), ErrorKind::ValueValidation | ErrorKind::InvalidValue)
        {
            self.mistakes.push(of_arguments("C30", &error).at(span(value)));
        }
        arguments
    }

    fn entry(
        &mut self,
        registry: &Registry,
        (name, model): (&String, &Model),
        cluster: &Options,
        workload: &Options,
    ) -> Option<Entry> {
        let names = [name.clone(), cluster.name.clone(), workload.name.clone()];
        let arguments = [cluster.arguments.as_slice(), &workload.arguments].concat();
        let request = cli::arguments_of::<PlanArgs>("plan", "model", &arguments)
            .map_err(|error| Failure::from(of_arguments("C30", &error)))
            .and_then(|args| {
                PlanRequest::of_args(registry, model.clone(), &args.workload, &args.layout, &args.narrowing)
            });
        match request {
            Ok(request) => Some(Entry { names, request, place: workload.place }),
            Err(failure) => {
                self.found(failure, workload.place, &format!("{}: ", names.join(" ")));
                None
            }
        }
    }

    /// Adds the mistakes that a part of the file leads to.
    fn found(&mut self, failure: Failure, place: Span, about: &str) {
        let of_file = |d: Diagnostic| Diagnostic { message: format!("{about}{}", d.message), ..d.at(place) };
        self.mistakes.extend(failure.diagnostics.into_iter().map(of_file));
    }

    /// Refuses the unknown keys of a table.
    fn compare(&mut self, table: &DeTable<'_>, of: &str, known: Vec<&str>) {
        for (key, place, _) in sorted(table) {
            if !known.contains(&key) {
                let refusal = Diagnostic::new("C30", format!("{of} has no key `{key}`"));
                let help = match nearest(key, known.iter().copied()) {
                    Some(near) => format!("did you mean `{near}`?"),
                    None => format!("keys: {}", known.join(", ")),
                };
                self.mistakes.push(refusal.help(help).at(place));
            }
        }
    }
}

impl Options {
    /// Whether a workload is for a model and a cluster.
    fn covers(&self, names: [&String; 2]) -> bool {
        FILTERS.iter().zip(names).all(|(key, name)| self.only.get(key).is_none_or(|only| only.contains(name)))
    }
}

/// A text as the name of a model, a cluster or a workload, which is a name of a folder or a file too: other characters become
/// hyphens.
pub(crate) fn name_of(text: &str) -> String {
    let name = text.replace(|c: char| !c.is_ascii_alphanumeric() && !"-_.".contains(c), "-");
    name.trim_start_matches(|c: char| !c.is_ascii_alphanumeric()).to_owned()
}

fn span<T>(spanned: &Spanned<T>) -> Span {
    let range = spanned.span();
    Span::new(range.start, range.end)
}

/// The items of a table, in the order of the file.
fn sorted<'a, 'i>(table: &'a DeTable<'i>) -> Named<'a, 'i> {
    let mut items: Named<'a, 'i> =
        table.iter().map(|(key, value)| (key.get_ref().as_ref(), span(key), value)).collect();
    items.sort_by_key(|(_, place, _)| place.start);
    items
}

/// A text, or a number as it is written.
fn text(value: &DeValue<'_>) -> Option<String> {
    match value {
        DeValue::String(text) => Some(text.to_string()),
        DeValue::Integer(number) => Some(number.to_string()),
        DeValue::Float(number) => Some(number.to_string()),
        DeValue::Boolean(_) | DeValue::Datetime(_) | DeValue::Array(_) | DeValue::Table(_) => None,
    }
}

fn texts(items: &DeArray<'_>) -> Option<Vec<String>> {
    items.iter().map(|item| text(item.get_ref())).collect()
}
