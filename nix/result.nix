# An image as one executable file: `nix build` leaves it as ./result.
{
  pkgs,
  python,
  skopeo,
}:
image:
pkgs.writeScript "${image.imageName}-image" ''
  #!${python}/bin/python3 -I
  IMAGE = "${image}"
  REFERENCE = "${image.imageName}:${image.imageTag}"
  SKOPEO = "${skopeo}/bin/skopeo"
  ${builtins.readFile ./result.py}
''
