//! The module `ithaca._ithaca`: plans, and commands that take them. `ithaca/_plan.py` gives it its Python form.
//!
//! Calls run on a thread of their own without the interpreter's lock, while the calling thread looks for signals. Without the
//! feature `extension-module` the crate is empty.
#![cfg(feature = "extension-module")]

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use ithaca::api::{self, Emitted, Session};
use ithaca::error::Failure;
use ithaca::passes::registry::Registry;
use ithaca::subject::{self, Model};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

/// Time between looks for signals.
const LOOK: Duration = Duration::from_millis(20);

/// Columns of texts.
const COLUMNS: usize = 100;

/// A plan.
#[pyclass(frozen, name = "RawPlan", module = "ithaca._ithaca")]
struct RawPlan {
    plan: Arc<ithaca::passes::plan::Plan>,
}

/// The result of a command, or its failure with repairs as arguments.
type Outcome<T> = Result<T, (Failure, Vec<Vec<String>>)>;

/// Runs `work` on another thread; a signal ends the call, and sets the flag that `work` gets.
fn interruptible<T: Send + 'static>(
    py: Python<'_>,
    work: impl FnOnce(&mut Session<'_>, &AtomicBool) -> Outcome<T> + Send + 'static,
) -> PyResult<T> {
    let stop = Arc::new(AtomicBool::new(false));
    let stopped = Arc::clone(&stop);
    let (sender, receiver) = sync_channel(1);
    let receiver = Mutex::new(receiver);
    let thread = std::thread::Builder::new().name("ithaca".to_owned()).spawn(move || {
        let registry = Registry::default();
        let mut session = Session {
            registry: &registry,
            progress: &mut |_| {},
            arguments: Vec::new(),
            width: COLUMNS,
            environment: &|name| std::env::var(name).ok(),
        };
        let outcome = work(&mut session, &stopped);
        // Nobody waits for the outcome of a call that a signal ended.
        let _ = sender.send(outcome);
    });
    thread.map_err(|error| PyRuntimeError::new_err(format!("no thread can be started: {error}")))?;
    loop {
        match py.detach(|| receiver.lock().unwrap_or_else(PoisonError::into_inner).recv_timeout(LOOK)) {
            Ok(outcome) => return outcome.map_err(|(failure, repairs)| raise(py, &failure, repairs)),
            Err(RecvTimeoutError::Timeout) => {
                if let Err(signal) = py.check_signals() {
                    stop.store(true, Ordering::Relaxed);
                    return Err(signal);
                }
            }
            Err(RecvTimeoutError::Disconnected) => {
                return Err(PyRuntimeError::new_err(
                    "a bug in Ithaca: the call panicked; standard error says where",
                ));
            }
        }
    }
}

/// The exception of a failure.
fn raise(py: Python<'_>, failure: &Failure, repairs: Vec<Vec<String>>) -> PyErr {
    let diagnostics: Vec<(String, String, Vec<String>)> = failure
        .diagnostics
        .iter()
        .map(|d| (d.code.to_string(), d.message.clone(), d.helps.iter().map(ToString::to_string).collect()))
        .collect();
    let made = py
        .import("ithaca._errors")
        .and_then(|module| module.getattr("IthacaError"))
        .and_then(|class| class.call1((diagnostics, repairs)));
    made.map_or_else(|error| error, PyErr::from_value)
}

fn without_repairs<T>(outcome: Result<T, Failure>) -> Outcome<T> {
    outcome.map_err(|failure| (failure, Vec::new()))
}

/// The options of a command: name, whether it takes a value, help.
#[pyfunction]
fn options(command: &str) -> Vec<(String, bool, String)> {
    api::options(command).into_iter().map(|o| (o.name, o.takes_value, o.help)).collect()
}

fn parsed_config(name: &str, json: &str) -> PyResult<Model> {
    let config = serde_json::from_str(json).map_err(|error| PyValueError::new_err(error.to_string()))?;
    Ok(api::model(name, &config))
}

/// Plans a model: the path of one, or its configuration as JSON. Returns the plan and notes.
#[pyfunction]
#[pyo3(signature = (options, *, path=None, name="model", json=None))]
fn plan(
    py: Python<'_>,
    options: Vec<String>,
    path: Option<String>,
    name: &str,
    json: Option<&str>,
) -> PyResult<(RawPlan, Vec<String>)> {
    let given = json.map(|json| parsed_config(name, json)).transpose()?;
    let planned = interruptible(py, move |session, stop| {
        let model = given.map_or_else(|| subject::described(Path::new(&path.unwrap_or_default())), Ok);
        let model = without_repairs(model)?;
        api::plan(model.clone(), &options, session, Some(stop)).map_err(|failure| {
            let repairs = api::repairs(session.registry, &failure, &model, &options);
            (failure, repairs)
        })
    })?;
    Ok((RawPlan { plan: Arc::new(planned.plan) }, planned.notes))
}

/// Reads the JSON of a plan; `name` is that of its file.
#[pyfunction]
fn read(py: Python<'_>, name: String, json: String) -> PyResult<RawPlan> {
    let plan = interruptible(py, move |session, _| {
        let plan = ithaca::passes::plan::Plan::from_json(session.registry, &name, &json);
        without_repairs(plan.map_err(Failure::from))
    })?;
    Ok(RawPlan { plan: Arc::new(plan) })
}

#[pymethods]
impl RawPlan {
    /// The document.
    fn json(&self) -> String {
        self.plan.to_json()
    }

    /// `ithaca explain`.
    fn explain(&self, py: Python<'_>, options: Vec<String>) -> PyResult<String> {
        let plan = Arc::clone(&self.plan);
        interruptible(py, move |session, _| without_repairs(api::explain(&plan, &options, session)))
    }

    /// `ithaca verify`: whether nothing differs, and the text.
    fn verify(&self, py: Python<'_>, options: Vec<String>) -> PyResult<(bool, String)> {
        let plan = Arc::clone(&self.plan);
        let done =
            interruptible(py, move |session, _| without_repairs(api::verify(&plan, &options, session)))?;
        Ok((done.code == 0, done.text))
    }

    /// `ithaca export`: the text.
    fn export(&self, py: Python<'_>, options: Vec<String>) -> PyResult<String> {
        let plan = Arc::clone(&self.plan);
        let export =
            interruptible(py, move |session, _| without_repairs(api::export(&plan, &options, session)))?;
        Ok(export.text)
    }

    /// `ithaca emit`: files by path; one without a path is a text.
    fn emit<'py>(
        &self,
        py: Python<'py>,
        options: Vec<String>,
    ) -> PyResult<Vec<(Option<String>, Bound<'py, PyBytes>)>> {
        let plan = Arc::clone(&self.plan);
        let emitted =
            interruptible(py, move |session, _| without_repairs(api::emit(&plan, &options, session)))?;
        Ok(match emitted {
            Emitted::Text(text) => vec![(None, PyBytes::new(py, text.as_bytes()))],
            Emitted::Files(files) => files
                .into_iter()
                .map(|(path, bytes)| (Some(path.display().to_string()), PyBytes::new(py, &bytes)))
                .collect(),
        })
    }
}

/// The module.
#[pymodule]
fn _ithaca(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_class::<RawPlan>()?;
    module.add_function(wrap_pyfunction!(options, module)?)?;
    module.add_function(wrap_pyfunction!(plan, module)?)?;
    module.add_function(wrap_pyfunction!(read, module)?)
}
