# One image: its layers, those that change least first, and the configuration that all images share.
{
  lib,
  nix2container,
  imageCommands,
  source,
  revision,
  # YYYYMMDDHHMMSS of the revision, in UTC: an image of the same source is the same image.
  date,
  # The repository's public URL, or null.
  home,
  licences,
}:
let
  created =
    let
      part = at: length: builtins.substring at length date;
    in
    "${part 0 4}-${part 4 2}-${part 6 2}T${part 8 2}:${part 10 2}:${part 12 2}Z";

  variables = lib.mapAttrsToList (name: value: "${name}=${value}");

  # The store has no writable files; these directories anyone may write, like /tmp. Said of every
  # path alike, as nix2container refuses a directory that two paths bring with different modes.
  writable = path: {
    path = "${path}";
    regex = "^/nix/store/[^/]+/(tmp|var/tmp|src|opt/cog-triton/work)$";
    mode = "1777";
  };

  # layers: [ { name; reason; copyToRoot ? [ ]; deps ? [ ]; } ]. They need not know each other:
  # only one of an image's layers has store paths that refer to others.
  toLayer =
    layer:
    nix2container.buildLayer {
      copyToRoot = layer.copyToRoot or [ ];
      deps = layer.deps or [ ];
      perms = map writable (layer.copyToRoot or [ ]);
      metadata = {
        created_by = "cog-triton: ${layer.name}";
        comment = layer.reason;
      };
    };

  build =
    {
      name,
      layers,
      env,
      labels,
      python,
      # The OpenAPI schema of the Cog project in /src.
      schema,
      # What it holds beside our source, as nix/licences.nix has it.
      components,
      gpu ? true,
      # Of cog_triton.serve, before a user's own.
      arguments ? [ ],
      description ? "cog-triton: Cog and Triton Inference Server",
      # What its SBOM tells of: image-commands.nix.
      contents ? {
        wheels = [ ];
      },
    }@described:
    let
      environment = {
        HOME = "/opt/cog-triton/work";
        COG_TRITON_WORK_DIR = "/opt/cog-triton/work";
        COG_PREDICT_TYPE_STUB = "predict.py:Predictor";
        COG_MAX_CONCURRENCY = "500";
        # Of the public ports; Cog and Triton listen on 127.0.0.1 only.
        COG_HOST = "0.0.0.0";
        PYTHONUNBUFFERED = "1";
      }
      // env;
      # What Cog's own command line reads: cog.yaml as JSON, and `pip freeze`.
      config = {
        build = {
          inherit gpu;
          python_version = python.version;
        };
        predict = environment.COG_PREDICT_TYPE_STUB;
        concurrency.max = lib.toInt environment.COG_MAX_CONCURRENCY;
      };
      freeze = lib.concatMapStrings (part: "${part.name}==${part.version}\n") (
        lib.filter (part: part.wheel) components
      );
      licence = licences.expression components;
      site = "/opt/cog-triton/lib/python${python.version}/site-packages";
      image = nix2container.buildImage {
        inherit name created;
        arch = "amd64";
        layers = map toLayer layers;
        config = {
          Entrypoint = [
            "/opt/cog-triton/bin/python"
            "-S"
            "-I"
            "${site}/cog_triton/system/reaper.py"
            "--"
          ];
          Cmd = [
            "python"
            "-m"
            "cog_triton.serve"
          ]
          ++ arguments;
          WorkingDir = "/src";
          User = "1000:1000";
          StopSignal = "SIGTERM";
          ExposedPorts = {
            "5000/tcp" = { };
            "8000/tcp" = { };
          };
          Env = variables environment;
          Labels = {
            "org.opencontainers.image.title" = name;
            "org.opencontainers.image.description" = description;
            "org.opencontainers.image.version" = source.version;
            "org.opencontainers.image.revision" = revision;
            "org.opencontainers.image.created" = created;
            "org.opencontainers.image.licenses" = licence;
            "org.opencontainers.image.vendor" = "cog-triton";
            "run.cog.has_init" = "true";
            "run.cog.config" = builtins.toJSON config;
            "run.cog.pip_freeze" = freeze;
            "run.cog.openapi_schema" = schema;
          }
          // lib.optionalAttrs (home != null) {
            "org.opencontainers.image.source" = home;
            "org.opencontainers.image.url" = home;
            "org.opencontainers.image.documentation" = "${home}/blob/main/docs/images.md";
          }
          // labels;
        };
      };
    in
    # Beside the derivation, not in it: nixpkgs refuses to evaluate one whose meta says unfree.
    imageCommands { inherit image components contents; }
    // {
      inherit image;
      meta = {
        inherit description;
        license = licences.list components;
        platforms = [ "x86_64-linux" ];
      }
      // lib.optionalAttrs (home != null) { homepage = home; };
      # The same image, described a little differently: what mkModel needs.
      overrideImage = change: build (change described);
    };
in
build
