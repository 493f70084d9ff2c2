# make chat       set everything up, then chat with a small model (answers a prompt piped into it, too)
# make test       set everything up, then lint, types and tests
# make test-all   the same with the slow tests, and with `make sanitize`
# make sanitize   the native code under the address, undefined-behaviour and thread sanitizers
# make fuzz       2,000 spoilt model files, each of which must end in a result or in one sentence
# make fuzz-coverage   the file reader (atheris) and the slice reader (libFuzzer, needs clang), SECONDS (3600) each
# make soak       10,000 short chats, in which memory and answers must stay what they are
# make clean      remove the environment and everything built
#
# What was done once is remembered in stamp files inside .venv: a second run goes straight to the point.

VENV := .venv
BIN := $(VENV)/bin
DEMO := smollm2-135m
# So small a model answers best with a plain system prompt and no randomness.
CHAT := --system "You are a helpful assistant." --temp 0 -n 512
NATIVE := $(wildcard native/*.cpp native/*.hpp)
SECONDS := 3600
CLANG = $(firstword $(foreach name,clang++ $(addprefix clang++-,22 21 20 19 18 17 16 15 14),$(shell command -v $(name))))
SETUP := scripts/setup_env.sh constraints.txt pyproject.toml native/CMakeLists.txt $(NATIVE)

.PHONY: chat test test-all check sanitize fuzz fuzz-coverage soak models clean

chat: $(VENV)/.run
	@$(BIN)/hybrid models pull $(DEMO) </dev/null >&2
	@$(BIN)/hybrid chat $(DEMO) $(CHAT)

# Hypothesis draws the same examples at each run here, so that what is green stays green; `make test-all` draws new ones.
test: check models
	$(BIN)/pytest -m "not slow" --hypothesis-profile ci

test-all: check models sanitize
	$(BIN)/pytest

# Needs the sanitizers' libraries, which come with gcc and clang. Two small programs, so they are quick to run; to build
# them takes a minute.
sanitize: $(VENV)/.dev
	@command -v cmake >/dev/null || [ -x $(BIN)/cmake ] || $(BIN)/pip install -q cmake
	@PATH="$$PATH:$(BIN)"; for kind in address,undefined thread; do \
	cmake -S native -B build/sanitize-$$kind -DHYBRID_SANITIZE=$$kind && cmake --build build/sanitize-$$kind --parallel 2 && \
	build/sanitize-$$kind/attention_check 300 && build/sanitize-$$kind/virtual_file_check 2000 || exit 1; \
	done

fuzz: $(VENV)/.dev
	$(BIN)/python -m scripts.fuzz_gguf

# What is found is left in build/fuzz, and a second run goes on where the first one ended.
fuzz-coverage: $(VENV)/.dev
	@[ -n "$(CLANG)" ] || { echo "clang is missing; on Debian and Ubuntu: sudo apt install clang" >&2; exit 2; }
	@mkdir -p build/fuzz/slice
	$(CLANG) -std=c++17 -O1 -g -D_GNU_SOURCE -D_FILE_OFFSET_BITS=64 -fsanitize=fuzzer,address,undefined \
	-fno-sanitize-recover=all native/virtual_file_fuzz.cpp native/virtual_file.cpp -o build/fuzz/virtual_file_fuzz
	build/fuzz/virtual_file_fuzz -max_total_time=$(SECONDS) -max_len=2000 -print_final_stats=1 \
	-artifact_prefix=build/fuzz/slice-found- build/fuzz/slice
	@$(BIN)/pip install -q atheris==3.0.0
	$(BIN)/python -m scripts.fuzz_reader --seconds $(SECONDS)

soak: $(VENV)/.dev
	$(BIN)/python -m scripts.soak

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(NATIVE)

# Gemma is under Google's terms, which a person has to accept; its tests are skipped, visibly, where nobody did.
models: $(VENV)/.dev
	$(BIN)/hybrid models pull $(DEMO)
	@case ",$$HYBRID_ACCEPT_LICENSE," in \
	*,gemma,*) echo $(BIN)/hybrid models pull gemma3-270m && $(BIN)/hybrid models pull gemma3-270m ;; \
	*) echo "Without HYBRID_ACCEPT_LICENSE=gemma the tests with Gemma are skipped." ;; \
	esac

$(VENV)/.run: $(SETUP)
	@scripts/setup_env.sh >&2
	@touch $@

$(VENV)/.dev: $(SETUP)
	@scripts/setup_env.sh dev >&2
	@touch $@ $(VENV)/.run

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
